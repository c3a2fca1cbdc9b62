"""Plain-text output shared by the sub-commands: errors, tables, ratios and a progress bar."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO


class CommandError(Exception):
    """A problem that the user can solve; shown as one message without a traceback."""

    status = 1  # with which the program ends


class UsageError(CommandError):
    """Arguments that argparse cannot know to be wrong."""

    status = 2


def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an argument that is some of these names, separated by commas."""

    def parsed(text: str) -> list[str]:
        given = text.split(",")
        for name in given:
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}")
        return given

    return parsed


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is an integer of at least so much."""

    def parsed(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    parsed.__name__ = "int"  # for argparse's error
    return parsed


def positive(text: str) -> float:
    """The type of an argument that is a positive number."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value


def writable(text: str) -> Path:
    """The type of an argument that is a file to write, found out before the work."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Lay out a table with the first column to the left and the others to the right.

    Args:
        header: one title per column.
        rows: one text per column and row.
        markdown: write a GitHub-flavoured Markdown table.

    Returns:
        The table's lines joined by newlines, without a newline at the end.
    """
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]

    def align(cells: Sequence[str]) -> list[str]:
        return [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]

    if markdown:
        rule = ["-" * widths[0], *["-" * (width - 1) + ":" for width in widths[1:]]]
        body = [align(lines[0]), rule, *[align(line) for line in lines[1:]]]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in body)
    body = [align(lines[0]), ["-" * width for width in widths], *map(align, lines[1:])]
    return "\n".join("  ".join(cells).rstrip() for cells in body)


def times(ratio: float) -> str:
    """A ratio such as ``1.94x``; a dash where there is none."""
    if math.isnan(ratio):
        return "-"
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


class ProgressBar:
    """A progress bar on a terminal; elsewhere a line per tenth of the steps.

    Args:
        total: number of steps.
        stream: where to write; default: stderr.
        width: the bar's width in characters.
    """

    def __init__(self, total: int, stream: TextIO | None = None, width: int = 28) -> None:
        self.total = max(1, total)
        self.stream = sys.stderr if stream is None else stream
        self.width = width
        self._started = time.monotonic()
        self._live = self.stream.isatty()
        self._last_tenth = 0
        self._last_length = 0

    def show(self, done: int, note: str = "") -> None:
        """Show that ``done`` of the steps are done, with a short note beside the bar."""
        elapsed = time.monotonic() - self._started
        left = elapsed / max(1, done) * (self.total - done)
        filled = self.width * done // self.total
        bar = "#" * filled + "." * (self.width - filled)
        line = f"[{bar}] {done}/{self.total}  {left:3.0f} s left  {note}"
        if self._live:
            self.stream.write("\r" + line.ljust(self._last_length))
            self._last_length = len(line)
        elif 10 * done // self.total > self._last_tenth:
            self._last_tenth = 10 * done // self.total
            self.stream.write(line + "\n")
        self.stream.flush()

    def count(self, done: int, note: str = "") -> None:
        """Show that ``done`` steps are done, if the total is not known."""
        if self._live:
            self.stream.write(f"\r{done} {note}")
            self.stream.flush()

    def close(self) -> None:
        """End the bar's line."""
        if self._live:
            self.stream.write("\n")
            self.stream.flush()
