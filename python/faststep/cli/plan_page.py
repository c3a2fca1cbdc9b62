"""What ``plan`` shows: the table of ways, the formats of states, the choice, and the plot."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..sizing.dry_run import DryRun
from ..sizing.formats import Format
from ..sizing.machine import Machine
from ..sizing.ways import SPARE, STAGES, Way, chosen, fits, tokens_for_offload
from .console import table
from .plots import new_figure

GIB = 2**30
MEMBERS = ("parameters", "gradients", "states", "messages", "activations")
_COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c8c8c", "#ff7f0e")


class Planned(NamedTuple):
    """All that is shown."""

    model: nn.Module
    optimizer: str
    machine: Machine
    bucket_mb: int
    kept: Format
    formats: Sequence[Format]
    runs: Sequence[DryRun]
    ways: Sequence[Way]


def report(planned: Planned) -> str:
    """The whole page as text."""
    parts = [_head(planned), _ways(planned), _formats(planned), _choice(planned), _notes(planned)]
    return "\n\n".join(part for part in parts if part)


def _size(count: float) -> str:
    """Bytes in GiB, with three digits or more."""
    value = count / GIB
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def _time(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}" if seconds else "-"


def _head(planned: Planned) -> str:
    machine, params = planned.machine, list(planned.model.parameters())
    elements = sum(param.numel() for param in params)
    dtypes = sorted({str(param.dtype).removeprefix("torch.") for param in params})
    lines = [
        f"{type(planned.model).__name__}: {elements / 1e6:,.1f} million parameters "
        f"({', '.join(dtypes)}); {planned.optimizer}",
        f"{machine.ranks} ranks: {machine.nodes} x {machine.gpus} GPUs of {_size(machine.memory)} "
        f"GiB; GB/s: {machine.inside / 1e9:g} inside of a node, {machine.link / 1e9:g} between "
        f"nodes, {machine.host / 1e9:g} to the host; {machine.flops / 1e12:g} TFLOP/s",
    ]
    if planned.runs:
        run = planned.runs[0]
        lines.append(
            f"loss() and backward: {run.flops / 1e12:.3g} TFLOP, "
            f"{_time(run.flops / machine.flops)} ms; forward leaves {_size(run.kept)} GiB"
        )
    return "\n".join(lines)


def _ways(planned: Planned) -> str:
    best = chosen(planned.ways, planned.machine)
    rows = []
    for way in planned.ways:
        mark = "*" if way is best else "" if fits(way, planned.machine) else "!"
        sizes = [_size(getattr(way.memory, name)) for name in MEMBERS]
        times = (way.communication, way.update, way.seconds)
        rows.append(
            [
                f"{way}{mark and ' ' + mark}",
                *(sizes if planned.runs else sizes[:-1]),
                _size(way.memory.peak),
                _size(way.host) if way.host else "-",
                f"{way.sent / 1e9:.2f}",
                *map(_time, times),
            ]
        )
    members = MEMBERS if planned.runs else MEMBERS[:-1]
    header = ["GiB of a rank", *members, "peak", "in host", "GB sent"]
    header += ["ms to send", "on host", "step"]
    notes = (
        "* the choice; ! does not fit. A step is the longest of sending, computing and the host."
    )
    return table(header, rows) + "\n" + notes


def _formats(planned: Planned) -> str:
    """Bytes of states in other formats."""
    trained = [param for param in planned.model.parameters() if param.requires_grad]
    elements, ranks = sum(param.numel() for param in trained), planned.machine.ranks
    rows = []
    for kept in planned.formats:
        whole = sum(kept.bytes[param.dtype].of(param.numel()) for param in trained)
        sharded = _size(whole / ranks)
        rows.append([str(kept), f"{whole / elements:.2f}", _size(whole), sharded])
    header = ["states and masters", "bytes per parameter", "GiB whole", "GiB sharded"]
    return table(header, rows)


def _choice(planned: Planned) -> str:
    machine, ways = planned.machine, planned.ways
    best = chosen(ways, machine)
    limit = f"{100 * SPARE:.0f} % of {_size(machine.memory)} GiB stay free"
    if best is None:
        least = min(ways, key=lambda way: way.memory.peak)
        return textwrap.fill(
            f"Nothing fits, where {limit}. The least is {least}: {_size(least.memory.peak)} GiB. "
            "More ranks, a smaller micro-batch or narrower states take less.",
            100,
        )
    faster = [way for way in ways if not fits(way, machine) and way.seconds <= best.seconds]
    simpler = [way for way in faster if ways.index(way) < ways.index(best)]
    reason = (
        f"its peak is {_size(best.memory.peak)} GiB, and of the ways that fit ({limit}) it has "
    )
    reason += f"the shortest step, {_time(best.seconds)} ms"
    if simpler:
        reason += f". As fast, but too large: {_listed(simpler)}"
    return textwrap.fill(f"Choice: {best}, because {reason}.", 100) + "\n" + _lines(planned, best)


def _listed(ways: Sequence[Way]) -> str:
    return "; ".join(f"{way} ({_size(way.memory.peak)} GiB)" for way in ways)


def _lines(planned: Planned, best: Way) -> str:
    """What the script says."""
    kind = planned.optimizer.partition(",")[0]
    lines = [
        f"    optimizer = faststep.optim.{kind}(model.parameters(), lr=...{planned.kept.options})"
    ]
    if best.stage == 0:
        if planned.machine.ranks > 1:
            lines.append("    # DistributedDataParallel(model, gradient_as_bucket_view=True)")
        if best.offloads:
            lines.append("    faststep.offload(optimizer, model=model)")
    else:
        bucket = "" if best.stage == 3 or planned.bucket_mb == 25 else planned.bucket_mb
        more = f", bucket_mb={bucket}" if bucket else ""
        more += ', offload="optimizer"' if best.offloads else ""
        lines.append(
            f"    optimizer = faststep.zero.shard(model, optimizer, stage={best.stage}{more})"
        )
    if best.checkpoints:
        lines.append("    # and torch.utils.checkpoint in the forward of each block")
    if best.offloads:
        lines.append("    # offload was tested on simulated GPUs only")
    return "\n".join(lines)


def _notes(planned: Planned) -> str:
    """From how many tokens on offload costs nothing; and what was left out."""
    lines = []
    offloads = {way.stage: way for way in planned.ways if way.offloads and not way.checkpoints}
    for stage, way in offloads.items():
        tokens = tokens_for_offload(planned.model, way, planned.machine)
        passes = ""
        if planned.runs and planned.runs[0].flops:
            each = way.update * planned.machine.flops / planned.runs[0].flops
            passes = f", or {each:.3g} loss() on each rank"
        lines.append(f"{STAGES[stage]}: {tokens:,} tokens per step{passes}")
    if lines:
        lines.insert(0, "Offload costs nothing where the host's update fits into the step, from:")
    if not planned.runs:
        lines.append("Without loss() activations and compute are not counted.")
    elif len(planned.runs) == 1:
        lines.append("Checkpointing is left out: the model has no blocks that repeat.")
    return "\n".join(lines)


def plot(output: Path, planned: Planned) -> None:
    """Stacked bars of the memory of each way."""
    ways, machine = planned.ways, planned.machine
    figure = new_figure(9, 1.5 + 0.32 * len(ways))
    axes: Any = figure.add_subplot()
    rows, left = range(len(ways)), [0.0] * len(ways)
    for name, colour in zip(MEMBERS, _COLOURS, strict=True):
        sizes = [getattr(way.memory, name) / GIB for way in ways]
        axes.barh(rows, sizes, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.axvline(machine.memory / GIB, color="#d62728", linestyle="--", label="a GPU's memory")
    best = chosen(ways, machine)
    axes.set_yticks(rows, [f"{way} *" if way is best else str(way) for way in ways], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"GiB of each of {machine.ranks} ranks at the peak (* the choice)")
    axes.legend(fontsize=8)
    figure.savefig(output, dpi=130)
