"""The plots, which need matplotlib."""

from __future__ import annotations

import argparse
import importlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .console import CommandError, UsageError, times, writable

# The first curve is broad, so that the second one on top of it hides nothing.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#ff7f0e", "linewidth": 4, "alpha": 0.6},
    {"color": "#1f77b4", "linewidth": 1.2},
)


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Declare ``--output`` and ``--no-plot`` of a command whose plot is called ``name``."""
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PNG",
        help=f"where the plot goes; default: faststep/{name} in $XDG_CACHE_HOME, or in ~/.cache",
    )
    parser.add_argument("--no-plot", action="store_true", help="write no plot")


def _cache() -> Path:
    """The folder for files that can be made again, by the XDG Base Directory Specification."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # the specification: others are to be ignored
        return given / "faststep"
    try:
        return Path.home() / ".cache" / "faststep"
    except RuntimeError as error:
        raise CommandError(f"no folder for the plot: {error}; pass --output or --no-plot") from None


def plot_path(arguments: argparse.Namespace, name: str) -> Path | None:
    """Where the plot goes, by what :func:`add_arguments` declares; None for no plot.

    Args:
        arguments: the user's.
        name: the file's name, if the user gave no path.
    """
    if arguments.no_plot:
        return None
    return can_be_drawn(arguments.output or _cache() / name, "pass --no-plot")


def can_be_drawn(output: Path, otherwise: str) -> Path:
    """Make sure, before the work, that a plot can be written.

    Args:
        output: its path; a missing folder is made.
        otherwise: what a user without matplotlib can do.

    Returns:
        The path, with ``.png`` where it had no suffix.

    Raises:
        CommandError: matplotlib is missing, the name ends otherwise, or nothing can be written
            there.
    """
    output = output if output.suffix else output.with_suffix(".png")
    if output.suffix.lower() != ".png":
        raise UsageError(f"the plot is a PNG, so {output} must end in .png")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        writable(str(output))
    except OSError as error:
        raise CommandError(f"the plot's folder cannot be made: {error}") from error
    except argparse.ArgumentTypeError as error:
        raise CommandError(f"the plot {error}") from None
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise CommandError(
            f'the plot needs matplotlib: pip install "faststep[demo]", or {otherwise}'
        ) from error
    return output


def new_figure(width: float, height: float) -> Any:
    """A figure of matplotlib, in inches, that ``savefig`` writes as PNG."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained"
    )
    importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


Trained = tuple[str, list[float], dict[str, float]]


def _curves(axes: Any, runs: Sequence[Trained]) -> None:
    for (name, losses, _), style in zip(runs, _STYLES, strict=True):
        axes.plot(losses, label=name, **style)
    axes.set_ylabel("loss")
    axes.set_xlabel("step")
    axes.legend()


def plain(value: float) -> str:
    """A number with three digits or more, and without an exponent."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def _gains(axes: Any, runs: Sequence[Trained]) -> None:
    """Bars of what the second run takes of the first one's time, faults and memory."""
    (first, _, before), (second, _, after) = runs
    rows = range(len(before))
    shares = [100 * after[key] / before[key] if before[key] else math.nan for key in before]
    axes.barh(rows, [100] * len(before), 0.8, color="#dddddd", label=f"{first} = 100 %")
    drawn = axes.barh(rows, shares, 0.45, color=_STYLES[1]["color"], label=second)
    gains = [
        f"{times(100 / share) if share else '-'}   {plain(before[key])} \u2192 {plain(after[key])}"
        for key, share in zip(before, shares, strict=True)
    ]
    for bar, gain, share in zip(drawn, gains, shares, strict=True):
        place = 0 if math.isnan(share) else max(100, share)
        axes.text(place + 3, bar.get_y() + bar.get_height() / 2, gain, va="center", fontsize=9)
    axes.set_yticks(rows, list(before))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.75 * max([100, *(share for share in shares if not math.isnan(share))]))
    axes.set_xticks([0, 50, 100], ["0", "50 %", "100 %"])
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)


def plot_trainings(output: Path, trainings: dict[str, list[Trained]], note: str) -> None:
    """Plot what trainings that were run in two ways took, and their losses.

    Args:
        output: the PNG's path.
        trainings: for each title the two runs: name, the loss of every step, and what it took, by
            what is shown beside the bar.
        note: what a reader must know of the machine; empty for nothing.
    """
    figure = new_figure(6 * len(trainings), 8)
    grid = figure.add_gridspec(2, len(trainings), height_ratios=(3, 2))
    if note:
        figure.suptitle(note, color="#d62728", fontsize=10)
    for column, (title, runs) in enumerate(trainings.items()):
        bars = figure.add_subplot(grid[0, column])
        bars.set_title(title, fontsize=11)
        _gains(bars, runs)
        _curves(figure.add_subplot(grid[1, column]), runs)
    figure.savefig(output, dpi=130)
