"""How much memory a sharded model will take on a rank, counted from its layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..optim.masters import begin_state, keys_for, refuse_codes
from .admitted import fused_class_of
from .hooks.reducer import MOST_UNDER_WAY
from .layout.cuts import Bucket, flats_of, make_buckets
from .stage3.blocks import blocks_of


@dataclass(frozen=True)
class StageMemory:
    """Bytes, on the rank that takes most.

    Attributes:
        parameters: parameters and buffers of the model.
        gradients: after a step and before `zero_grad()`.
        states: of the optimizer, with its fp32 masters.
        messages: what backward needs beside these at its peak: gradients, buckets that are filled
            or sent, slices that arrive; at stage 3 gathered parameters.
    """

    parameters: int
    gradients: int
    states: int
    messages: int

    @property
    def between(self) -> int:
        """Between steps."""
        return self.parameters + self.gradients + self.states

    @property
    def peak(self) -> int:
        """At the peak of backward, without activations."""
        return self.between + self.messages


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


class _States(NamedTuple):
    """Bytes of an optimizer's states."""

    per_element: int
    per_tensor: int  # counters of steps

    def of(self, count: int) -> int:
        return count * self.per_element + self.per_tensor


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
    params = list(model.parameters())
    trained = [param for param in params if param.requires_grad]
    states = {p.dtype: _states_of(optimizer_class, p, master_weights) for p in trained}
    found = {}
    for one in possible if stage is None else (stage,):
        if ranks == 1:
            kept = sum(states[p.dtype].of(p.numel()) for p in trained)
            whole = sum(param.nbytes for param in params)
            found[one] = StageMemory(whole, sum(p.nbytes for p in trained), kept, 0)
        elif one == 3:
            found[one] = _fully_sharded(params, blocks_of(model), ranks, states)
        else:
            how = (ranks, bucket_mb * 2**20, one == 1, states, master_weights)
            found[one] = _sharded(model, *how)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return Estimate(
        ranks, {one: replace(m, parameters=m.parameters + buffers) for one, m in found.items()}
    )


def _states_of(
    optimizer_class: Callable[[list[Any]], Optimizer], like: Tensor, master_weights: bool
) -> _States:
    """The entries that the optimizer keeps for parameters of a dtype, by starting a small one."""
    probe = nn.Parameter(torch.zeros(2, dtype=like.dtype, device="cpu"))
    script = optimizer_class([probe])
    refuse_codes(script)
    fused = fused_class_of(script, master_weights)([{**script.param_groups[0]}])
    (rule,) = fused._rules()
    if keys_for(rule, probe):
        begin_state(fused, fused.param_groups[0], rule, probe)
    kept = [value for value in fused.state[probe].values() if isinstance(value, Tensor)]
    return _States(
        sum(value.itemsize for value in kept if value.dim()),
        sum(value.itemsize for value in kept if not value.dim()),
    )


def _sharded(
    model: nn.Module,
    ranks: int,
    bucket_bytes: float,
    keeps_buffers: bool,
    states: Mapping[torch.dtype, _States],
    keeps_masters: bool,
) -> StageMemory:
    """Stage 1, which keeps the memory of whole gradients, or 2."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    on_cuda = any(param.is_cuda for param in model.parameters())
    buckets = make_buckets(flats_of(reversed(trained)), ranks, bucket_bytes)
    frozen = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    kept = max(
        sum(states[b.dtype].of(piece.size) for b in buckets for piece in b.pieces_of(rank))
        for rank in range(ranks)
    )
    whole = sum(bucket.size * bucket.dtype.itemsize for bucket in buckets)
    gradients, messages = _passing(buckets, ranks, keeps_buffers, on_cuda, keeps_masters)
    return StageMemory(whole + frozen, gradients, kept, messages)


def _passing(
    buckets: Sequence[Bucket], ranks: int, keeps_buffers: bool, on_cuda: bool, keeps_masters: bool
) -> tuple[int, int]:
    """Gradients and messages while buckets pass through a backward without anything else."""
    whole = [bucket.size * bucket.dtype.itemsize for bucket in buckets]
    own = [bucket.part * bucket.dtype.itemsize for bucket in buckets]
    sent = [0 if keeps_buffers else size for size in whole]  # freed when they were sent
    is_wide = [keeps_masters and bucket.dtype.itemsize == 2 for bucket in buckets]
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
            peak = max(peak, now + place.size * bucket.dtype.itemsize)
        now = before + sent[number]
        while under_way and sum(whole[n] for n, _ in under_way) + whole[number] > MOST_UNDER_WAY:
            receive()
        block = free.pop() if free else 0
        now += max(0, parts * own[number] - block)
        under_way.append((number, max(block, parts * own[number])))
    while under_way:
        receive()
    return gradients, max(0, peak - gradients)


def _fully_sharded(
    params: Sequence[Tensor],
    blocks: Sequence[nn.Module],
    ranks: int,
    states: Mapping[torch.dtype, _States],
) -> StageMemory:
    """Stage 3, as fully_shard works on rank 0: a block's parameters are gathered for the block."""
    place = {id(param): number for number, param in enumerate(params)}
    rest = {id(param): param for param in params}
    groups = [[rest.pop(id(p)) for p in b.parameters() if id(p) in rest] for b in blocks]

    def gathered(members: Iterable[Tensor]) -> int:
        return ranks * sum(_part(param, ranks) for param in members)

    root = gathered(rest.values())  # gathered from forward to the end of backward
    done = before = peak = 0  # gradients: reduced; of the block before, which are being sent
    for number in reversed(range(len(groups))):
        mine = gathered(filter(_is_trained, groups[number]))
        end = max((place[id(param)] for param in groups[number]), default=0)
        later = [p for p in rest.values() if place[id(p)] > end]  # theirs came before
        now = root + gathered(filter(_is_trained, later)) + done // ranks + before + mine
        now += gathered(groups[number - 1]) if number else 0  # is being gathered
        # Then gradients are copied side by side, and gloo makes a copy of that.
        peak = max(peak, now + gathered(groups[number]), now + mine + mine // ranks)
        done, before = done + mine, mine
    mine = gathered(filter(_is_trained, rest.values()))
    gradients = (done + mine) // ranks
    peak = max(peak, root + gradients + before + 2 * mine)
    trained = filter(_is_trained, params)
    kept = sum(states[p.dtype].of(_part(p, ranks) // p.itemsize) for p in trained)
    return StageMemory(gathered(params) // ranks, gradients, kept, max(0, peak - gradients))


def _is_trained(param: Tensor) -> bool:
    return param.requires_grad


def _part(param: Tensor, ranks: int) -> int:
    """Bytes of a rank's part of a parameter, which is cut along its first dimension."""
    size = param.shape[0] if param.dim() else 1
    return -(-size // ranks) * (param.nbytes // max(1, size))
