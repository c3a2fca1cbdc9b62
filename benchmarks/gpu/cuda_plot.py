"""Draws what a run has saved, on a machine that has matplotlib: python cuda_plot.py RUN.json"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from faststep.cli.plots import plot_outcomes
from faststep.cli.timing import Outcome
from faststep.cli.workloads import Work

__all__ = ["draw"]


def draw(saved: Path) -> Path:
    """The PNG beside a JSON file."""
    run = json.loads(saved.read_text())
    outcomes = [
        Outcome(
            Work(row["family"], row["label"], ((row["elements"],),)),
            row["seconds"],
            row["absent"],
            math.nan if row["copy_rate"] is None else row["copy_rate"],
            order=tuple(row["order"]),
        )
        for row in run["works"]
    ]
    output = saved.with_suffix(".png")
    plot_outcomes(output, run["machine"], outcomes)
    return output


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
