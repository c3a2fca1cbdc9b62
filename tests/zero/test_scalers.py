"""GradScalers of torch and of faststep: an inf on one rank skips the step on all of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import faststep
from faststep import zero
from ranks import on_ranks

from .common import HOST, Given, Place, differences, grads_for, mean_of

SHAPES = [(200, 100), (100,), (40000,), (7,)]


OPTIONS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 3}


SCALED = ["ours, plain", "ours, unscale", "ours, max_norm", "torch, plain", "torch, unscale"]


@on_ranks(2, name=SCALED)
def test_scalers_skip_on_every_rank(rank: int, world: int, name: str) -> None:
    whose, how = name.split(", ")
    kind = faststep.amp.GradScaler if whose == "ours" else torch.amp.GradScaler
    check_scaled(rank, world, how, [kind("cpu", **OPTIONS) for _ in range(2)])


def check_scaled(
    rank: int, world: int, how: str, scalers: Sequence[Any], place: Place = HOST
) -> None:
    """A scaler on a run with an inf on rank 1 in step 2, against a single process with another."""
    model, whole = place.moved(Given(SHAPES, [torch.float32])), Given(SHAPES, [torch.float32])
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), bucket_mb=0.1)
    reference = faststep.optim.AdamW(whole.parameters(), lr=0.01)
    scaler, other = scalers
    limit = {"max_norm": 1.0} if how == "max_norm" else {}
    wrong, scales, skipped = [], [], []
    for step in range(6):

        def grads(of: Given, rank: int, step: int = step) -> list[Tensor]:
            made = grads_for(of, rank, step)
            if step == 2 and rank == 1:
                made[2].view(-1)[5] = float("inf")
            return made

        with place.without_waiting(step > 0 and isinstance(scaler, faststep.amp.GradScaler)):
            place.backward(scaler.scale(model(grads(model, rank))))
            if how == "unscale":
                scaler.unscale_(optimizer)
                norm = optimizer.clip_grad_norm_(1.0)
            scaler.step(optimizer, **limit)
            scaler.update()
        scale = other.scale(torch.ones(())).item()
        parts = [grads(whole, r) for r in range(world)]
        for param, rows in zip(whole.parameters(), zip(*parts, strict=True), strict=True):
            param.grad = mean_of([row * scale for row in rows])
        if how == "unscale":
            other.unscale_(reference)
            expected = faststep.clip_grad_norm_(list(whole.parameters()), 1.0)
            scales += [norm.item(), expected.item()]
        other.step(reference, **limit)
        other.update()
        optimizer.zero_grad()
        reference.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        scales += [scaler.get_scale(), other.get_scale()]
        wrong += [f"{step}, p{n}" for n in differences(model.parameters(), whole.parameters())]
    assert wrong == []
    assert skipped == [False, False, True, False, False, False]
    assert str(scales[::2]) == str(scales[1::2])
