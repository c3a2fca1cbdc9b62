"""The PNG of what was measured; of a saved run on CUDA: python benchmarks/plots.py RUN.json"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contenders import OURS
from faststep.cli.console import times
from faststep.cli.plots import new_figure
from timing import Outcome
from workloads import FAMILIES, Work

_COLOURS = ("#1f77b4", "#17becf", "#ff7f0e", "#d62728", "#9467bd", "#8c564b")


def _ratio_bars(axes: Any, family: str, outcomes: Sequence[Outcome]) -> None:
    names = [name for name in outcomes[0].names if name != OURS]
    height = 0.8 / max(1, len(names))
    everything = [r for o in outcomes for r in map(o.ratio, names) if not math.isnan(r)]
    left, right = 0.7 * min([0.9, *everything]), 1.6 * max([2.0, *everything])
    for i, name in enumerate(names):
        ratios = [outcome.ratio(name) for outcome in outcomes]
        places = [row - 0.4 + height * (i + 0.5) for row in range(len(outcomes))]
        drawn = axes.barh(
            places,
            [left if math.isnan(ratio) else ratio for ratio in ratios],
            0.9 * height,
            color=_COLOURS[(i + 1) % len(_COLOURS)],
            label=name,
        )
        labels = ["not measured" if math.isnan(ratio) else times(ratio) for ratio in ratios]
        axes.bar_label(drawn, labels, padding=2, fontsize=7)
    axes.axvline(1.0, color=_COLOURS[0], linewidth=1.5, label=f"{OURS} = 1")
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if left <= t <= right]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(outcomes)), [outcome.work.label for outcome in outcomes])
    axes.invert_yaxis()
    axes.set_title(FAMILIES[family].title, fontsize=9)
    axes.set_xlabel("time / faststep's time")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def _sweep_lines(axes: Any, sweep: str, outcomes: Sequence[Outcome]) -> None:
    for i, name in enumerate(outcomes[0].names):
        points = [
            (
                len(outcome.work.shapes) if sweep == "tensors" else outcome.work.elements,
                1e3 * outcome.median(name),
            )
            for outcome in outcomes
        ]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker="o", color=_COLOURS[i % len(_COLOURS)], label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tensors of 64 elements" if sweep == "tensors" else "elements of one tensor")
    axes.set_ylabel("median ms")
    axes.set_title(f"AMP chain, cost against the number of {sweep}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def plot_outcomes(output: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """Plot the ratios of every family as bars and the sweeps as lines.

    Args:
        output: the PNG's path.
        title: above the plot.
        outcomes: what was measured; those that hold no times are left out.
    """
    measured = [outcome for outcome in outcomes if outcome.seconds]
    bars = {
        family: [o for o in measured if o.work.family == family and not o.work.sweep]
        for family in FAMILIES
    }
    panels = [(family, chosen) for family, chosen in bars.items() if chosen]
    sweeps = [
        (sweep, [o for o in measured if o.work.sweep == sweep]) for sweep in ("tensors", "elements")
    ]
    panels += [(sweep, chosen) for sweep, chosen in sweeps if chosen]
    columns = min(2, max(1, len(panels)))
    lines = math.ceil(len(panels) / columns)
    figure = new_figure(6.5 * columns, 4 * max(1, lines))
    figure.suptitle(title, fontsize=8)
    for i, (name, chosen) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, i + 1)
        if name in FAMILIES:
            _ratio_bars(axes, name, chosen)
        else:
            _sweep_lines(axes, name, chosen)
    figure.savefig(output, dpi=130)


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
