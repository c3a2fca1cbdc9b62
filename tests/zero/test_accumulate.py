"""faststep.accumulate with a sharded optimizer."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import faststep
from faststep import zero
from faststep._torch.dtensor import full_tensor
from ranks import assert_alike, on_ranks

from .common import Given, grads_for

SHAPES = [(200, 100), (100,), (7,)]


CASES: dict[str, tuple[Any, Any, str]] = {
    "mean": ("mean", 1, ""),
    "mean, clipped by the step": ("mean", 2, "step"),
    "sum": ("sum", 2, ""),
    "tokens, clipped by hand": ("tokens", 2, "by hand"),
    "tokens": ("tokens", 1, ""),
    "tokens at stage 3": ("tokens", 3, "step"),
    "mean at stage 3": ("mean", 3, "by hand"),
}


@on_ranks(2, case=CASES)
def test_windows(rank: int, world: int, case: str) -> None:
    """Windows of 3, the last one flushed after 2 (on rank 1 after 1), against one process."""
    normalize, stage, how = CASES[case]
    model, whole = Given(SHAPES, [torch.float32]), Given(SHAPES, [torch.float64])
    clip = 1.0 if how else None
    optimizer = zero.shard(model, faststep.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    reference = faststep.optim.SGD(whole.parameters(), lr=0.1, max_grad_norm=clip)
    if how == "step":
        optimizer.max_grad_norm = clip
    accum = faststep.accumulate(optimizer, 3, normalize=normalize, model=model)
    calls: list[int] = []
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
        values = [full_tensor(p.detach()) for p in model.parameters()]
        for value, expected in zip(values, whole.parameters(), strict=True):
            assert float((value.double() - expected).abs().max()) < 1e-5
    dist.all_to_all_single = exchange
    assert_alike(values)


def _sum(parts: list[Tensor]) -> Tensor:
    return sum((part.double() for part in parts[1:]), start=parts[0].double())
