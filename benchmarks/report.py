"""What was measured, as text, Markdown and JSON."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from contenders import OURS
from faststep import _C
from faststep.cli.console import table, times
from faststep.cli.info import cpu_model, version_of
from timing import Outcome
from workloads import FAMILIES

_DISTRIBUTIONS = ("torch", "deepspeed", "torch-optimi", "bitsandbytes")


def machine() -> str:
    """One line with the processor, the threads and the versions."""
    versions = [f"{name} {version_of(name)}" for name in _DISTRIBUTIONS if version_of(name)]
    cpu = _C.cpu_info()
    return (
        f"{cpu_model()}, {torch.get_num_threads()} threads, instruction set {cpu['isa']}; "
        + ", ".join(versions)
    )


def duration(seconds: float) -> str:
    """A time in ms, with three significant digits."""
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _rows(outcome: Outcome) -> list[list[str]]:
    rows = []
    for name in outcome.names:
        if name in outcome.absent:
            short = outcome.absent[name].split(" (")[0].split(":")[0]
            rows.append([outcome.work.label, name, short, "-", "-", "-"])
        elif outcome.seconds.get(name):
            rate = outcome.rate(name)
            ratio = "" if name == OURS else times(outcome.ratio(name))
            moved = ["-", "-"]
            if rate:
                share = 100 * rate / outcome.copy_rate
                moved = [f"{rate / 1e9:.1f}", "-" if math.isnan(share) else f"{share:.0f} %"]
            rows.append([outcome.work.label, name, duration(outcome.median(name)), ratio, *moved])
    return rows


def _load_note(outcomes: Sequence[Outcome]) -> str:
    cores = os.cpu_count() or 1
    load = max((o.load for o in outcomes if not math.isnan(o.load)), default=0.0)
    if load <= cores + 0.5:
        return ""
    return (
        f"Other programs ran at the same time (load {load:.1f} on {cores} cores), so threads "
        "waited for each other: these ratios are not to be relied on."
    )


def as_text(outcomes: Sequence[Outcome], markdown: bool = False) -> str:
    """One table per family of work.

    Args:
        outcomes: what was measured.
        markdown: write Markdown instead of plain text.

    Returns:
        The tables; "time / ours" is the median's ratio to faststep's in the same run, GB/s the
        least traffic of the work over the median, and "of copy" its share of ``copy_``'s rate.
    """
    header = ["tensors", "contender", "median ms", "time / ours", "GB/s", "of copy"]
    parts = []
    for key, family in FAMILIES.items():
        chosen = [outcome for outcome in outcomes if outcome.work.family == key]
        rows = [row for outcome in chosen for row in _rows(outcome)]
        if rows:
            title = family.title
            if family.bytes_per_element:
                title += f" ({family.bytes_per_element} bytes per fp32 element at least)"
            parts += [f"### {title}\n" if markdown else title, table(header, rows, markdown), ""]
            absent = dict.fromkeys(f"{n}: {why}" for o in chosen for n, why in o.absent.items())
            parts += [*absent, ""] if absent else []
    rates = [outcome.copy_rate for outcome in outcomes if not math.isnan(outcome.copy_rate)]
    if rates:
        parts.append(
            f"torch's copy_: {statistics.median(rates) / 1e9:.1f} GB/s in the median, "
            f"{min(rates) / 1e9:.1f} to {max(rates) / 1e9:.1f} GB/s over the works "
            "(8 bytes per fp32 element)."
        )
    parts += [note for note in [_load_note(outcomes)] if note]
    return "\n".join(parts)


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything that was measured, with each round's time in seconds."""
    return {
        "machine": machine(),
        "works": [
            {
                "family": outcome.work.family,
                "label": outcome.work.label,
                "tensors": len(outcome.work.shapes),
                "elements": outcome.work.elements,
                "dtype": str(outcome.work.dtype).removeprefix("torch."),
                "true_norm": outcome.work.true_norm,
                "fresh_gradients": outcome.work.fresh_gradients,
                "least_bytes": outcome.work.least_bytes,
                "copy_rate": None if math.isnan(outcome.copy_rate) else outcome.copy_rate,
                "load": None if math.isnan(outcome.load) else outcome.load,
                "seconds": outcome.seconds,
                "absent": outcome.absent,
            }
            for outcome in outcomes
        ],
    }
