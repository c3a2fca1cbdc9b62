"""The tables of the CUDA benchmarks, beside those that they share with the CPU's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from contenders import OURS
from cuda_contest import CudaOutcome
from cuda_works import FOREACH, FUSED, LARGE, MANY, PLAIN, TINY
from faststep.cli.console import table, times
from report import as_json, as_text, duration, machine
from workloads import FAMILIES, MAX_NORM

__all__ = ["cuda_goals", "cuda_introduction", "cuda_json", "cuda_machine", "cuda_tables"]


def cuda_machine() -> str:
    """One line about where the figures come from."""
    if not torch.cuda.is_available():
        return f"no CUDA device; {machine()}"
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
        f"{properties.multi_processor_count} multiprocessors, sm_{properties.major}"
        f"{properties.minor}, CUDA {torch.version.cuda}; {machine()}"
    )


def cuda_introduction() -> str:
    """How it was measured."""
    smoke = "REHEARSAL on tiny tensors: the figures mean nothing.\n\n" if TINY else ""
    return (
        f"{cuda_machine()}\n\n{smoke}"
        "Contenders share parameters and gradients and take turns round by round; medians. The "
        "gradients are restored before every round, untimed. Their global norm is 4 and the limit "
        f"{MAX_NORM:g}, so clipping acts. Device time is what CUDA events around a round tell, "
        "with copies queued before it, so that the host is ahead of the device and no cache holds "
        "the tensors; where a contender waits for the device itself, or queues more launches than "
        "the driver takes, its waits count. Whole time is from an idle device until it is done, "
        "host time until the call returns. Launches are kernels, without copies and fills. GB/s "
        "is the least traffic over the device time; the copy is torch's copy_ on the device, reads "
        "and writes counted. bf16 has no loss scale: torch's GradScaler does not take it on CUDA."
    )


def _median(values: dict[str, list[float]], name: str) -> float:
    return statistics.median(values[name]) if values.get(name) else math.nan


def _details(outcomes: Sequence[CudaOutcome], markdown: bool) -> str:
    header = ["tensors", "contender", "host ms", "/ ours", "whole ms", "/ ours", "launches"]
    parts = []
    for key, family in FAMILIES.items():
        rows = []
        for outcome in (o for o in outcomes if o.work.family == key):
            for name in (n for n in outcome.names if n in outcome.seconds):
                cells = [outcome.work.label, name]
                for values in (outcome.host, outcome.whole):
                    median = _median(values, name)
                    ratio = "" if name == OURS else times(median / _median(values, OURS))
                    cells += [duration(median), ratio]
                launches = outcome.launches.get(name)
                rows.append([*cells, "-" if launches is None else str(launches)])
        if rows:
            title = f"{family.title}: host and launches"
            parts += [f"### {title}\n" if markdown else title, table(header, rows, markdown), ""]
    return "\n".join(parts)


def cuda_tables(outcomes: Sequence[CudaOutcome], markdown: bool = False) -> str:
    """Device times, and then host times, whole times and launches."""
    return f"{as_text(outcomes, markdown)}\n\n{_details(outcomes, markdown)}"


def cuda_goals(outcomes: Sequence[CudaOutcome], markdown: bool = False) -> str:
    """What must be shown, beside what was measured."""
    found = {(o.work.family, o.work.label.split(", ")[0]): o for o in outcomes if o.seconds}
    rows: list[list[str]] = []

    def add(outcome: CudaOutcome, what: str, against: str, goal: float, value: float) -> None:
        verdict = "reached" if value >= goal else "missed"
        if math.isnan(value) or TINY:
            verdict = "not judged: rehearsal" if TINY else "not measured"
        title = FAMILIES[outcome.work.family].title.split(":")[0]
        where = f"{title}: {outcome.work.label}"
        rows.append([where, what, against, times(goal), times(value), verdict])

    for label in LARGE:
        if outcome := found.get(("cuda chain", label)):
            for rival, goal in ((FUSED, 1.6), (FOREACH, 3.0)):
                add(outcome, "device time", rival, goal, outcome.ratio(rival))
            rate = outcome.rate(OURS) / outcome.copy_rate
            add(outcome, "bytes/s", "copy on the device", 0.9, rate)
    if outcome := found.get(("cuda chain", MANY)):
        for rival, goal in ((FUSED, 20.0), (FOREACH, 40.0)):
            ratio = _median(outcome.whole, rival) / _median(outcome.whole, OURS)
            add(outcome, "whole time", rival, goal, ratio)
    if outcome := found.get(("cuda adamw", PLAIN)):
        ratio = _median(outcome.host, FUSED) / _median(outcome.host, OURS)
        add(outcome, "host time", FUSED, 10.0, ratio)
    for (family, _), outcome in found.items():
        launches = outcome.launches.get(OURS)
        if family == "cuda chain":
            # begin and update, and of torch's the fill of found_inf and the scale's own update
            value = math.nan if launches is None else 4 / launches
            add(outcome, "launches", "4 launches", 1.0, value)
    return table(["work", "what", "against", "at least", "measured", ""], rows, markdown)


def cuda_json(outcomes: Sequence[CudaOutcome]) -> dict[str, Any]:
    """Everything that was measured; times in seconds."""
    result = as_json(outcomes)
    result["machine"] = cuda_machine()
    for row, outcome in zip(result["works"], outcomes, strict=True):
        row["order"] = outcome.names
        row["host"], row["whole"] = outcome.host, outcome.whole
        row["launches"] = outcome.launches
    return result
