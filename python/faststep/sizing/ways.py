"""The ways to spread a training over ranks, what each takes, and the choice between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from ..zero.estimate import Layout, StageMemory, count
from ..zero.layout.cuts import flats_of, make_buckets
from ..zero.stage3.blocks import blocks_of
from .dry_run import DryRun
from .formats import Format
from .machine import Machine

SPARE = 0.1  # of a GPU's memory: CUDA's own, and fragments
PADDING = 0.05  # by which buckets may be larger than their parameters
MIB = 2**20
SENT = {0: 2, 1: 2, 2: 2, 3: 3}  # times the parameters' bytes
STAGES = {0: "none", 1: "stage 1", 2: "stage 2", 3: "stage 3"}


class Way(NamedTuple):
    """One way.

    Args:
        stage: 0 is DistributedDataParallel.
        checkpoints: each block's forward is repeated in backward.
        offloads: states and masters are in host memory, where the host updates them.
        memory: bytes on a GPU, where the states of an offloaded optimizer are none.
        host: bytes of a rank in host memory: states, masters, and copies of gradients and
            parameters.
        sent: bytes that a rank sends in a step.
        communication, compute, update: seconds; the last one is the host's, with its copies.
    """

    stage: int
    checkpoints: bool
    offloads: bool
    memory: StageMemory
    host: int
    sent: float
    communication: float
    compute: float
    update: float

    @property
    def seconds(self) -> float:
        """A step if all that can overlap does."""
        return max(self.communication, self.compute, self.update)

    def __str__(self) -> str:
        more = ", checkpointing" * self.checkpoints + ", offload" * self.offloads
        return STAGES[self.stage] + more


def bucket_mb_for(model: nn.Module, ranks: int) -> int:
    """The least of 25, 50, 100 ... MiB with which gaps between slices take little."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad][::-1]
    whole = sum(param.nbytes for _, param in trained)
    size = 25
    while size * MIB < whole:
        buckets = make_buckets(flats_of(trained), ranks, size * MIB)
        padded = sum(bucket.size * bucket.dtype.itemsize for bucket in buckets)
        if padded <= (1 + PADDING) * whole:
            break
        size *= 2
    return size


def ways_of(
    model: nn.Module,
    kept: Format,
    machine: Machine,
    bucket_mb: float,
    runs: Sequence[DryRun],
    on_cuda: bool,
) -> list[Way]:
    """All ways, those with less to do first.

    Args:
        runs: dry runs without and with checkpoints; or none.
    """
    found = []
    stages = [0] if machine.ranks == 1 else [0, 1, 2, 3]
    for number, run in enumerate(runs or [DryRun()]):
        for stage in stages:
            live = run.live if runs else None
            masters = kept.masters != "none"
            layout = Layout(
                machine.ranks, stage, bucket_mb * MIB, masters, on_cuda, live, run.forward
            )
            memory = count(model, kept.bytes, layout)
            for offloads in (False, True):
                found.append(_way(model, machine, layout, memory, run, bool(number), offloads))
    return found


def _way(
    model: nn.Module,
    machine: Machine,
    layout: Layout,
    memory: StageMemory,
    run: DryRun,
    checkpoints: bool,
    offloads: bool,
) -> Way:
    trained = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    ranks, stage = machine.ranks, layout.stage
    sent = SENT[stage] * trained * (ranks - 1) / ranks
    parts = len(blocks_of(model)) + 1 if stage == 3 else -(-trained // int(layout.bucket_bytes))
    compute = run.flops / machine.flops
    part = trained / (ranks if stage else 1)
    moved = 2 * memory.states + 3 * part  # read and written; and gradients
    update = 2 * part / machine.host + moved * machine.gpus / machine.dram if offloads else 0.0
    return Way(
        stage,
        checkpoints,
        offloads,
        replace(memory, states=0) if offloads else memory,
        int(memory.states + 2 * part) if offloads else 0,
        sent,
        machine.seconds(sent, SENT[stage] * parts),
        compute,
        update,
    )


def fits(way: Way, machine: Machine) -> bool:
    """True if a way leaves the spare part of a GPU's memory free."""
    return way.memory.peak <= (1 - SPARE) * machine.memory


def chosen(ways: Sequence[Way], machine: Machine) -> Way | None:
    """The way with the shortest step of those that fit; of equal ones the first."""
    fitting = [way for way in ways if fits(way, machine)]
    return min(fitting, key=lambda way: way.seconds, default=None)


def tokens_for_offload(model: nn.Module, way: Way, machine: Machine) -> int:
    """Tokens per step, on all ranks, in whose forward and backward the host's update fits.

    A token takes 6 operations per parameter.
    """
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    per_rank = -(-way.update * machine.flops // (6 * trained)) if trained else 0
    return int(per_rank) * machine.ranks
