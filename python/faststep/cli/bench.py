"""``python -m faststep bench``: ratios on this machine against torch and installed rivals."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from . import plots
from .console import CommandError, Progress
from .report import as_json, as_text, machine
from .timing import CopyMeter, Outcome, run_contest
from .workloads import FAMILIES, MAX_NORM, SHAPES, Work

__all__ = ["HELP", "add_arguments", "run"]

HELP = "measure optimizers, scaling and clipping against torch and installed rivals"

_PLOT = "bench.png"
_QUICK_SHAPES = ("2000 x 64", "16 x 1M")
_DEFAULT_SHAPES = ("2000 x 64", "16 x 1M", "ResNet-50")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench``."""
    parser.add_argument(
        "--quick", action="store_true", help=f"only {' and '.join(_QUICK_SHAPES)}, few rounds"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=list(SHAPES),
        metavar="NAME",
        help=f"any of {', '.join(SHAPES)} (GPT-2 small takes 8 GiB)",
    )
    parser.add_argument(
        "--seconds", type=_seconds, help="time per row of the tables; default 3, with --quick 0.5"
    )
    plots.add_arguments(parser, _PLOT)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the time of every round")


def _seconds(text: str) -> float:
    """A time in seconds, as an argument of argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return seconds


def _works(shapes: Sequence[str]) -> list[Work]:
    return [Work(family, name, SHAPES[name]()) for name in shapes for family in FAMILIES]


def run(arguments: argparse.Namespace) -> None:
    """Measure, print tables, and write the plot."""
    output = plots.plot_path(arguments, _PLOT)
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise CommandError(f"--json {arguments.json}: there is no such folder")
    shapes = arguments.shapes or (_QUICK_SHAPES if arguments.quick else _DEFAULT_SHAPES)
    seconds = arguments.seconds
    if seconds is None:
        seconds = 0.5 if arguments.quick else 3.0
    works = _works(shapes)
    meter = CopyMeter()
    progress = Progress(len(works))
    outcomes: list[Outcome] = []
    for i, work in enumerate(works):
        progress.show(i, f"{work.key}")
        outcomes.append(run_contest(work, meter, seconds, 3 if arguments.quick else 5))
    progress.show(len(works), "done")
    progress.close()

    print(f"{machine()}\n")
    print(
        f"fp32 on the CPU. The gradients' norm is {works[0].true_norm:g} and the limit "
        f"{MAX_NORM:g}, so gradients are clipped. Contenders take turns; times are medians.\n"
    )
    print(as_text(outcomes))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(outcomes), indent=1) + "\n")
        print(f"Every round: {arguments.json}", file=sys.stderr)
    if output is not None:
        plots.plot_outcomes(output, machine(), outcomes)
        print(f"Plot: {output}")
