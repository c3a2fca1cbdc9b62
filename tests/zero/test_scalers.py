"""GradScalers of torch and of faststep: an inf on one rank skips the step on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import faststep
from faststep import zero
from ranks import Job

from .common import Given, differences, grads_for, mean_of

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
Ranks = Callable[[str], list[Any]]
SHAPES = [(200, 100), (100,), (40000,), (7,)]


def _scaled(rank: int, world: int, ours: bool, how: str) -> dict[str, Any]:
    """A scaler on a run with an inf on rank 1 in step 2, against a single process."""
    model, whole = Given(SHAPES, [torch.float32]), Given(SHAPES, [torch.float32])
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), bucket_mb=0.1)
    reference = faststep.optim.AdamW(whole.parameters(), lr=0.01)
    kind = faststep.amp.GradScaler if ours else torch.amp.GradScaler
    scaler, other = (kind("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2))
    wrong, scales, skipped = [], [], []
    for step in range(6):
        bad = step == 2
        parts = [grads_for(model, r, step) for r in range(world)]
        if bad:
            parts[1][2].view(-1)[5] = float("inf")
        scaler.scale(model(parts[rank])).backward()
        scale = other.scale(torch.ones(())).item()
        for param, rows in zip(whole.parameters(), zip(*parts, strict=True), strict=True):
            param.grad = mean_of([row * scale for row in rows])
        for one, opt in ((scaler, optimizer), (other, reference)):
            if how == "unscale":
                one.unscale_(opt)
                norm = (
                    opt.clip_grad_norm_(1.0)
                    if opt is optimizer
                    else faststep.clip_grad_norm_(list(whole.parameters()), 1.0)
                )
                scales.append(norm.item())
            if how == "max_norm":
                one.step(opt, max_norm=1.0)
            else:
                one.step(opt)
            one.update()
        optimizer.zero_grad()
        reference.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        scales += [scaler.get_scale(), other.get_scale()]
        wrong += [f"{step}, p{n}" for n in differences(model.parameters(), whole.parameters())]
    return {"wrong": wrong, "scales": scales, "skipped": skipped}


@pytest.mark.parametrize(
    "name", ["ours, plain", "ours, unscale", "ours, max_norm", "torch, plain", "torch, unscale"]
)
def test_scalers_skip_on_every_rank(name: str, ranks: Ranks) -> None:
    first, second = ranks(f"scaled: {name}")
    assert first["wrong"] == second["wrong"] == []
    assert str(first["scales"]) == str(second["scales"])
    assert first["skipped"] == second["skipped"] == [False, False, True, False, False, False]
    pairs = first["scales"]
    assert str(pairs[::2]) == str(pairs[1::2])


JOBS = [
    *(
        Job(f"scaled: {'ours' if ours else 'torch'}, {how}", 2, _scaled, (ours, how))
        for ours in (True, False)
        for how in ("plain", "unscale", "max_norm")
        if ours or how != "max_norm"
    ),
]
