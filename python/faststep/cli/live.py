"""``run --live`` and ``run --log``: shows and keeps what a script does while it trains."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ..doctor.peers import RECENT, mean, of_torchrun
from ..doctor.watching import Display, Figures, Watch
from ..run.report import say

PERIOD = 10.0  # seconds between two lines where there is no page
HEIGHT = 12  # lines of the page
LEAST_ROWS = 2 * HEIGHT  # of a terminal that has room for the page
MOST_RANKS = 5  # on the page, beside rank 0: those that wait most for data
Others = Callable[[], list[Figures]]  # the newest figures of the other ranks


def opened(path: str) -> TextIO:
    """The file of the log, empty; under torchrun each rank has its own: `log.0.jsonl`."""
    file = Path(path)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        file = file.with_suffix(f".{os.environ.get('RANK', '0')}{file.suffix}")
    try:
        return file.open("w")
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{str(file)!r} cannot be written: {error.strerror}"
        ) from None


def watched(live: bool, log: TextIO | None) -> Watch:
    """Watches this thread while it is entered.

    Args:
        live: show it on stderr, on rank 0, with a line for each other rank.
        log: where lines of JSON are written.
    """
    displays: list[Display] = []
    if live:
        peers = of_torchrun(say)
        if os.environ.get("RANK", "0") == "0":
            displays.append(_display(list if peers is None else peers.told))
        elif peers is not None:
            displays.append(peers)
    if log is not None:
        displays.append(Log(log))
    return Watch(displays, say)


def _display(others: Others = list) -> Display:
    stream = sys.__stderr__
    if stream is None or not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return Text(others)
    if importlib.util.find_spec("rich") is None:
        say("lines take the place of a page, because rich is not installed")
        return Text(others)
    if os.get_terminal_size(stream.fileno()).lines < LEAST_ROWS:
        say(f"lines take the place of a page, which needs a terminal of {LEAST_ROWS} lines")
        return Text(others)
    return Page(stream, others)


class Log(Display):
    """Writes lines of JSON, as far as there is room."""

    def __init__(self, file: TextIO) -> None:
        self._file: TextIO | None = file

    def show(self, figures: Figures) -> None:
        if self._file is None:
            return
        loss = figures["loss"]
        if loss is not None and not math.isfinite(loss):
            figures = {**figures, "loss": None}  # JSON has no such numbers
        try:
            self._file.write(json.dumps(figures) + "\n")
            self._file.flush()
        except OSError as error:
            say(f"the log ends here: {error}")
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Text(Display):
    """Writes a line of text every ten seconds, and one for each other rank."""

    def __init__(self, others: Others = list) -> None:
        self._others = others
        self._shown_at = -math.inf
        self._said_at = time.monotonic()
        self._left: Figures | None = None  # that were not said

    def show(self, figures: Figures) -> None:
        self._left = figures
        if time.monotonic() - self._shown_at >= PERIOD:
            self._shown_at = self._said_at = time.monotonic()
            self.close()

    def wait(self, phase: str, seconds: float) -> None:
        if time.monotonic() - self._said_at >= PERIOD:
            self._said_at = time.monotonic()
            say(_pause(phase, seconds))

    def close(self) -> None:
        """Say the newest figures, if they were not said."""
        if self._left is not None:
            say(_sentence(self._left))
            for one in self._others():
                say(", ".join(_of_rank(one)))
            self._left = None


class Page(Display):
    """Draws on the last lines of a terminal; the script's output scrolls above them.

    The terminal is told which of its lines scroll, so nothing of the script is replaced. A
    terminal that is gone ends nothing.
    """

    def __init__(self, stream: TextIO, others: Others = list) -> None:
        import rich.console

        self._others = others
        self._stream = stream
        self._console = rich.console.Console(file=stream)
        self._figures: deque[Figures] = deque(maxlen=RECENT)
        self._write("\n" * HEIGHT + f"\x1b[{HEIGHT}A")
        self._draw("no step so far")

    def show(self, figures: Figures) -> None:
        self._figures.append(figures)
        self._draw("")

    def wait(self, phase: str, seconds: float) -> None:
        self._draw(_pause(phase, seconds))

    def close(self) -> None:
        """Give all lines back to the script, and say the newest figures."""
        self._write("\x1b7\x1b[r\x1b8\x1b[J")
        if self._figures:
            say(_sentence(self._figures[-1]))

    def _draw(self, note: str) -> None:
        with contextlib.suppress(OSError):
            top = os.get_terminal_size(self._stream.fileno()).lines - HEIGHT
            rows = [f"\x1b[{top + 1 + i};1H\x1b[2K{row}" for i, row in enumerate(self._rows(note))]
            self._write(f"\x1b7\x1b[1;{top}r{''.join(rows)}\x1b[0m\x1b[J\x1b8")

    def _write(self, text: str) -> None:
        """As one piece, past the stream's buffer."""
        with contextlib.suppress(OSError):
            os.write(self._stream.fileno(), text.encode(self._stream.encoding, "replace"))

    def _rows(self, note: str) -> list[str]:
        from rich.progress_bar import ProgressBar
        from rich.rule import Rule
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for name, share in _sorted(mean([one["phases"] for one in self._figures])):
            bar = ProgressBar(total=1.0, completed=share, width=40)
            table.add_row(name, f"{share:6.1%}", bar)
        newest = self._figures[-1] if self._figures else None
        with self._console.capture() as captured:
            self._console.print(Rule("faststep run"))
            for texts in ([], []) if newest is None else (_progress(newest), _used(newest)):
                self._console.print("   ".join(texts), highlight=True, no_wrap=True)
            late = sorted(self._others(), key=lambda one: -one["phases"].get("data", 0.0))
            for one in sorted(late[:MOST_RANKS], key=lambda one: one["rank"]):
                self._console.print("   ".join(_of_rank(one)), highlight=True, no_wrap=True)
            self._console.print(table)
        return [*captured.get().splitlines()[: HEIGHT - 1], note]


def _sentence(figures: Figures) -> str:
    phases = ", ".join(f"{name} {share:.0%}" for name, share in _sorted(figures["phases"]))
    return "; ".join([", ".join(_progress(figures)), phases, ", ".join(_used(figures))])


def _of_rank(figures: Figures) -> list[str]:
    """A line, short enough for a page."""
    data = f"data {figures['phases'].get('data', 0.0):.0%}"
    memory = f"{figures['rss'] / 2**20:.0f} MiB"
    return [f"rank {figures['rank']}", *_progress(figures)[1:], data, memory]


def _pause(phase: str, seconds: float) -> str:
    return f"no step for {seconds:.0f} s: {phase}"


def _progress(figures: Figures) -> list[str]:
    loss = [] if figures["loss"] is None else [f"loss {figures['loss']:.6g}"]
    return [f"step {figures['step']}", f"{figures['steps_per_second']:.4g} steps/s", *loss]


def _used(figures: Figures) -> list[str]:
    memory = f"{figures['rss'] / 2**20:.0f} MiB (peak {figures['peak'] / 2**20:.0f} MiB)"
    used = [f"memory {memory}", f"CPU {figures['cpu']:.2f} s/s"]
    if (gpu := figures["gpu"]) is not None:
        used.append(f"GPU {gpu['utilization']:.0%}, {gpu['memory'] / 2**20:.0f} MiB")
    return used


def _sorted(phases: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(phases.items(), key=lambda one: -one[1])
