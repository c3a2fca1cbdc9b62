"""How much memory a sharded model will take on a rank, counted from its layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..optim.base import FusedOptimizer
from ..optim.masters import begin_state, keys_for
from .admitted import Kept, fused_class_of
from .hooks.reducer import MOST_UNDER_WAY
from .layout.cuts import Bucket, flats_of, make_buckets
from .stage3.blocks import blocks_of

PROBE = 2**14  # elements; enough for states in codes
MANY = 64  # ranks; of more some are looked at


@dataclass(frozen=True)
class StageMemory:
    """Bytes, on the rank that takes most.

    Attributes:
        parameters: parameters and buffers of the model.
        gradients: after a step and before `zero_grad()`.
        states: of the optimizer, with its fp32 masters.
        messages: what backward needs beside these at its peak: gradients, buckets that are filled
            or sent, slices that arrive; at stage 3 gathered parameters.
        activations: what a dry run of forward and backward adds to that; `python -m faststep plan`.
    """

    parameters: int
    gradients: int
    states: int
    messages: int
    activations: int = 0

    @property
    def between(self) -> int:
        """Between steps."""
        return self.parameters + self.gradients + self.states

    @property
    def peak(self) -> int:
        """At the peak of backward."""
        return self.between + self.messages + self.activations


@dataclass(frozen=True)
class Estimate:
    """The memory of each stage. `print` shows a table in MB (10^6 bytes)."""

    ranks: int
    stages: dict[int, StageMemory]

    def __str__(self) -> str:
        titles = ("parameters", "gradients", "states", "between", "messages", "peak")
        lines = ["  ".join(("stage", *titles)) + f"  (MB of each of {self.ranks} ranks)"]
        for stage, memory in self.stages.items():
            cells = [f"{getattr(memory, t) / 1e6:.1f}".rjust(len(t)) for t in titles]
            lines.append("  ".join((f"{stage:<5}", *cells)))
        return "\n".join(lines)


class States(NamedTuple):
    """Bytes of an optimizer's states."""

    per_element: float
    per_tensor: int  # counters of steps

    def of(self, count: int) -> int:
        return round(count * self.per_element) + self.per_tensor


class Layout(NamedTuple):
    """How a model is spread over ranks.

    Args:
        stage: 0 is DistributedDataParallel with `gradient_as_bucket_view=True`.
        live: bytes of activations, and of that gradient, while a parameter's gradient is made, by
            the parameter's `id`; without it only the gradient.
        forward: bytes of activations at most before the first gradient.
    """

    ranks: int
    stage: int
    bucket_bytes: float
    keeps_masters: bool
    on_cuda: bool
    live: Mapping[int, int] | None = None
    forward: int = 0


def estimate(
    model: nn.Module,
    optimizer_class: Callable[[list[Any]], Optimizer],
    *,
    ranks: int,
    stage: Literal[1, 2, 3] | None = None,
    bucket_mb: float = 25,
    master_weights: bool = False,
) -> Estimate:
    """Count the bytes that a rank will hold after :func:`shard`, without sharding the model.

    ::

        with torch.device("meta"):
            model = Model()
        print(faststep.zero.estimate(model, torch.optim.AdamW, ranks=4))

    Activations, and what Python, torch and gloo take, are not counted. At the peak, messages are
    taken to arrive as late as they may.

    Args:
        model: its parameters that require a gradient are counted as the optimizer's. The meta
            device counts as CPU memory.
        optimizer_class: makes an optimizer of a list of parameters: a class, or
            `functools.partial(torch.optim.SGD, momentum=0.9)`.
        ranks: how many share the model. 1 counts an ordinary optimizer.
        stage: default: None, all that the other arguments are for.
        bucket_mb, master_weights: as for :func:`shard`.

    Raises:
        TypeError: an optimizer that `shard` does not take.
        ValueError: an argument out of range.
    """
    possible = (1, 2) if master_weights else (1, 2, 3)
    if ranks < 1 or not bucket_mb > 0:
        raise ValueError(f"ranks ({ranks}) and bucket_mb ({bucket_mb}) must be positive")
    if stage is not None and stage not in possible:
        raise ValueError(f"stage must be one of {possible} with these arguments, not {stage!r}")
    trained = [param for param in model.parameters() if param.requires_grad]
    states = {p.dtype: _states_of(optimizer_class, p, master_weights) for p in trained}
    on_cuda = any(param.is_cuda for param in model.parameters())
    stages: Sequence[int] = possible if stage is None else (stage,)
    layouts = [Layout(ranks, s, bucket_mb * 2**20, master_weights, on_cuda) for s in stages]
    return Estimate(ranks, {one.stage: count(model, states, one) for one in layouts})


def count(model: nn.Module, states: Mapping[torch.dtype, States], layout: Layout) -> StageMemory:
    """The bytes of a rank, in a layout with or without activations."""
    found = _counted(model, states, layout._replace(live=None, forward=0))
    if layout.live is not None:
        more = _counted(model, states, layout)
        found = replace(more, messages=found.messages, activations=more.peak - found.peak)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return replace(found, parameters=found.parameters + buffers)


def _counted(model: nn.Module, states: Mapping[torch.dtype, States], layout: Layout) -> StageMemory:
    if layout.ranks == 1 or layout.stage == 0:
        return _whole(model, states, layout)
    if layout.stage == 3:
        return _fully_sharded(list(model.parameters()), blocks_of(model), states, layout)
    return _sharded(model, states, layout)


def _whole(model: nn.Module, states: Mapping[torch.dtype, States], layout: Layout) -> StageMemory:
    """An ordinary optimizer."""
    trained = [param for param in model.parameters() if param.requires_grad]
    gradients = sum(param.nbytes for param in trained)
    now = 0 if layout.ranks == 1 else gradients  # DistributedDataParallel's buckets stay
    peak = now + layout.forward
    for param in reversed(trained):
        peak = max(peak, now + _live(param, layout))
        now += param.nbytes if layout.ranks == 1 else 0
    kept = sum(states[p.dtype].of(p.numel()) for p in trained)
    whole = sum(param.nbytes for param in model.parameters())
    return StageMemory(whole, gradients, kept, max(0, peak - gradients))


def _live(param: Tensor, layout: Layout) -> int:
    """Bytes that a parameter's gradient, and activations, take while it is made."""
    return param.nbytes if layout.live is None else layout.live.get(id(param), param.nbytes)


def _states_of(
    optimizer_class: Callable[[list[Any]], Optimizer], like: Tensor, master_weights: bool
) -> States:
    """The entries that the optimizer keeps for parameters of a dtype, by starting a small one."""
    probe = nn.Parameter(torch.zeros(PROBE, dtype=like.dtype, device="cpu"))
    script = optimizer_class([probe])
    kept = Kept.of(script, master_weights or None)
    return states_of(fused_class_of(script, kept)([{**script.param_groups[0]}]))


def states_of(fused: FusedOptimizer) -> States:
    """Those of an optimizer of one parameter, which has `PROBE` elements."""
    (rule,), (group,) = fused._rules(), fused.param_groups
    (probe,) = group["params"]
    if keys_for(rule, probe):
        begin_state(fused, group, rule, probe)
    kept = [value for value in fused.state[probe].values() if isinstance(value, Tensor)]
    return States(
        sum(value.nbytes for value in kept if value.dim()) / PROBE,
        sum(value.nbytes for value in kept if not value.dim()),
    )


def _sharded(model: nn.Module, states: Mapping[torch.dtype, States], layout: Layout) -> StageMemory:
    """Stage 1, which keeps the memory of whole gradients, or 2."""
    ranks = layout.ranks
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad][::-1]
    buckets = make_buckets(flats_of(trained), ranks, layout.bucket_bytes)
    frozen = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    kept = max(
        sum(states[b.dtype].of(piece.size) for b in buckets for piece in b.pieces_of(rank))
        for rank in range(0, ranks, -(-ranks // MANY))
    )
    whole = sum(bucket.size * bucket.dtype.itemsize for bucket in buckets)
    live = [_live(param, layout) for _, param in trained]
    gradients, messages = _passing(buckets, live, layout)
    return StageMemory(whole + frozen, gradients, kept, messages)


def _passing(buckets: Sequence[Bucket], live: Sequence[int], layout: Layout) -> tuple[int, int]:
    """Gradients and messages while buckets pass through a backward."""
    ranks, on_cuda, keeps_buffers = layout.ranks, layout.on_cuda, layout.stage == 1
    whole = [bucket.size * bucket.dtype.itemsize for bucket in buckets]
    own = [bucket.part * bucket.dtype.itemsize for bucket in buckets]
    sent = [0 if keeps_buffers else size for size in whole]  # freed when they were sent
    is_wide = [layout.keeps_masters and bucket.dtype.itemsize == 2 for bucket in buckets]
    kept_sums = [size * (1 + wide) for size, wide in zip(own, is_wide, strict=True)]
    slices = [  # written when they arrive
        0 if on_cuda or (keeps_buffers and not wide) else size
        for size, wide in zip(kept_sums, is_wide, strict=True)
    ]
    # What ranks send of a slice lies side by side before it is added; NCCL adds it.
    parts = 0 if on_cuda else ranks - (ranks == 2)
    now = peak = sum(whole) - sum(sent) + sum(kept_sums) * on_cuda  # on a device they stay
    gradients = now + sum(slices)
    # Blocks for what arrives are given by how much of each was written.
    under_way: deque[tuple[int, int]] = deque()  # buckets and their blocks
    free: list[int] = []

    def receive() -> None:
        nonlocal now, peak
        number, block = under_way.popleft()
        now += slices[number]
        peak = max(peak, now)
        now -= sent[number]
        free.append(block)

    for number, bucket in enumerate(buckets):
        before = now
        for place in bucket.places:
            if sent[number]:
                now = before + (place.begin + place.size) * bucket.dtype.itemsize
            peak = max(peak, now + live[place.param])
        now = before + sent[number]
        while under_way and sum(whole[n] for n, _ in under_way) + whole[number] > MOST_UNDER_WAY:
            receive()
        block = free.pop() if free else 0
        now += max(0, parts * own[number] - block)
        under_way.append((number, max(block, parts * own[number])))
    while under_way:
        receive()
    # The slices of the step before are there until the first gradient.
    return gradients, max(0, peak - gradients, layout.forward)


def _fully_sharded(
    params: Sequence[Tensor],
    blocks: Sequence[nn.Module],
    states: Mapping[torch.dtype, States],
    layout: Layout,
) -> StageMemory:
    """Stage 3, as fully_shard works on rank 0: a block's parameters are gathered for the block."""
    ranks = layout.ranks
    place = {id(param): number for number, param in enumerate(params)}
    rest = {id(param): param for param in params}
    groups = [[rest.pop(id(p)) for p in b.parameters() if id(p) in rest] for b in blocks]

    def gathered(members: Iterable[Tensor]) -> int:
        return ranks * sum(_part(param, ranks) for param in members)

    def active(members: Iterable[Tensor]) -> int:
        return max((_live(p, layout) - p.nbytes for p in members if p.requires_grad), default=0)

    root = gathered(rest.values())  # gathered from forward to the end of backward
    last = place[id(groups[-1][-1])] if groups and groups[-1] else -1
    first = [param for param in rest.values() if place[id(param)] > last]
    done = before = 0  # gradients: reduced; of the block before, which are being sent
    peak = root + max(active(first), layout.forward) + gathered(groups[-1] if groups else ())
    for number in reversed(range(len(groups))):
        mine = gathered(filter(_is_trained, groups[number]))
        end = max((place[id(param)] for param in groups[number]), default=0)
        later = [p for p in rest.values() if place[id(p)] > end]  # theirs came before
        now = root + gathered(filter(_is_trained, later)) + done // ranks + before + mine
        now += gathered(groups[number - 1]) if number else 0  # is being gathered
        now += active(groups[number])
        # Then gradients are copied side by side, and gloo makes a copy of that.
        peak = max(peak, now + gathered(groups[number]), now + mine + mine // ranks)
        done, before = done + mine, mine
    mine = gathered(filter(_is_trained, rest.values()))
    gradients = (done + mine) // ranks
    early = [param for param in rest.values() if place[id(param)] < last]
    peak = max(peak, root + gradients + before + 2 * mine + active(early))
    trained = filter(_is_trained, params)
    kept = sum(states[p.dtype].of(_part(p, ranks) // p.itemsize) for p in trained)
    return StageMemory(gathered(params) // ranks, gradients, kept, max(0, peak - gradients))


def _is_trained(param: Tensor) -> bool:
    return param.requires_grad


def _part(param: Tensor, ranks: int) -> int:
    """Bytes of a rank's part of a parameter, which is cut along its first dimension."""
    size = param.shape[0] if param.dim() else 1
    return -(-size // ranks) * (param.nbytes // max(1, size))
