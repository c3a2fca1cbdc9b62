"""faststep.accumulate with a sharded optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import faststep
from faststep import zero
from ranks import Job

from .common import Given, grads_for

Ranks = Callable[[str], list[Any]]
SHAPES = [(200, 100), (100,), (7,)]


def _windows(rank: int, world: int, normalize: Any, stage: int, how: str) -> dict[str, Any]:
    """Windows of 3, the last one flushed after 2 (on rank 1 after 1), against one process."""
    model, whole = Given(SHAPES, [torch.float32]), Given(SHAPES, [torch.float64])
    clip = 1.0 if how else None
    optimizer = zero.shard(model, faststep.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    reference = faststep.optim.SGD(whole.parameters(), lr=0.1, max_grad_norm=clip)
    if how == "step":
        optimizer.max_grad_norm = clip
    accum = faststep.accumulate(optimizer, 3, normalize=normalize, model=model)
    far, calls = [], []
    exchange = dist.all_to_all_single
    dist.all_to_all_single = lambda *a, **k: (calls.append(1), exchange(*a, **k))[1]
    for window in range(3):
        # At stage 3 a backward pass is a collective, so ranks must have as many of them.
        counts = [[3, 3], [3, 3], [2, 2 if stage == 3 else 1]][window]
        for micro in range(counts[rank]):
            with accum:
                if normalize == "tokens":
                    accum.add_count(5 + rank + micro)
                accum.backward(model(grads_for(model, rank, micro, window)))
            if micro < 2:
                assert not calls, "communicated before the last micro-step"
        if window == 2:
            assert accum.flush()
        assert accum.ready
        if how == "by hand":
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        calls.clear()
        parts = [(r, m) for r in range(world) for m in range(counts[r])]
        divisor = {
            "mean": float(len(parts)),
            "sum": float(world),
            "tokens": float(sum(5 + r + m for r, m in parts)),
        }[normalize]
        for number, param in enumerate(whole.parameters()):
            param.grad = _sum([grads_for(model, r, m, window)[number] for r, m in parts]) / divisor
        reference.step()
        far.append(
            max(
                float((_whole(a).double() - b).abs().max())
                for a, b in zip(model.parameters(), whole.parameters(), strict=True)
            )
        )
    dist.all_to_all_single = exchange
    return {"far": far, "values": [_whole(p).clone() for p in model.parameters()]}


def _whole(param: Tensor) -> Tensor:
    param = param.detach()
    return param.full_tensor() if isinstance(param, DTensor) else param


def _sum(parts: list[Tensor]) -> Tensor:
    return sum((part.double() for part in parts[1:]), start=parts[0].double())


CASES = [
    *[("mean", 1, ""), ("mean", 2, "step"), ("sum", 2, "")],
    *[("tokens", 2, "by hand"), ("tokens", 1, "")],
    *[("tokens", 3, "step"), ("mean", 3, "by hand")],
]


@pytest.mark.parametrize("case", CASES)
def test_windows(case: tuple[str, int, str], ranks: Ranks) -> None:
    first, second = ranks(f"windows of {case}")
    assert max(*first["far"], *second["far"]) < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(first["values"], second["values"], strict=True))


JOBS = [Job(f"windows of {case}", 2, _windows, case) for case in CASES]
