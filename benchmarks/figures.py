"""What is not a ratio of two times: bytes, page faults, times with a limit of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench_rows import SMOKE
from faststep.cli.console import table


@dataclass(frozen=True)
class Figure:
    """One number beside its goal.

    Args:
        what: what was measured.
        unit: of the number.
        value: the number.
        goal: what it must be, at most or at least.
        at_least: whether the goal is a lower limit.
    """

    what: str
    unit: str
    value: float
    goal: float
    at_least: bool = False


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"


def figures_text(figures: Sequence[Figure], markdown: bool = False) -> str:
    """A table of figures, with a verdict unless this is a smoke run."""
    rows = []
    for figure in figures:
        reached = figure.value >= figure.goal if figure.at_least else figure.value <= figure.goal
        verdict = "not judged: smoke run" if SMOKE else "reached" if reached else "missed"
        limit = f"at {'least' if figure.at_least else 'most'} {_number(figure.goal)}"
        rows.append([figure.what, figure.unit, limit, _number(figure.value), verdict])
    return table(["figure", "unit", "goal", "measured", ""], rows, markdown)
