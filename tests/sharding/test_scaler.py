"""Loss scaling of sharded parameters: an overflow on one rank makes all ranks skip the step."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import faststep
import faststep.optim
from ranks import on_ranks

from .common import Twins, backward, fully_sharded, local, locals_of, whole

SCALE = 256.0
LIMIT = 0.3
STEPS = 3
BAD = 1  # the step in which a gradient overflows

# scaler, optimizer, how it is clipped, options of the optimizer
WAYS: list[tuple[Any, Any, str, dict[str, Any]]] = [
    (scaler, optimizer, clip, options)
    for scaler, optimizer in itertools.product(
        (faststep.amp.GradScaler, torch.amp.GradScaler), (faststep.optim.AdamW, torch.optim.AdamW)
    )
    for clip, options in (
        ("", {}),
        ("", {"fused": True}),
        ("by hand", {}),
        ("inside", {"max_grad_norm": LIMIT}),
        ("by the scaler", {}),
    )
    if clip != "inside" or optimizer is faststep.optim.AdamW
    if clip != "by the scaler" or scaler is faststep.amp.GradScaler
]


def train(
    way: tuple[Any, Any, str, dict[str, Any]], model: nn.Module, rank: int, bad_rank: int
) -> list[Any]:
    """Steps, of which one has an infinite gradient on one rank; the scale after each."""
    scaler_class, cls, clip, options = way
    optimizer = cls(model.parameters(), lr=0.1, **options)
    scaler = scaler_class("cpu", init_scale=SCALE, growth_interval=100)
    scaler.scale(torch.zeros(()))
    found = []
    for step in range(STEPS):
        backward(model, rank, step, scaler.get_scale())
        if step == BAD and rank == bad_rank:
            local(next(iter(model.parameters())).grad)[0, 0] = math.inf
        before = locals_of(model.parameters())
        if clip == "by hand":
            scaler.unscale_(optimizer)
            module = faststep if cls is faststep.optim.AdamW else nn.utils
            module.clip_grad_norm_(model.parameters(), LIMIT)
        if clip == "by the scaler":
            scaler.step(optimizer, max_norm=LIMIT)
        else:
            scaler.step(optimizer)
        scaler.update()
        same = all(map(torch.equal, before, locals_of(model.parameters())))
        has_any = any(part.numel() for part in before)  # the last of 4 ranks has none
        assert same == (step == BAD or not has_any), (way, step)
        found.append(scaler.get_scale())
        optimizer.zero_grad()
    for state in optimizer.state.values():
        assert state["step"] == STEPS - 1
    return found


@on_ranks(2, 4)
def test_overflow_on_one_rank(rank: int, world: int) -> None:
    """All skip or none does, for every pair of scalers and optimizers, and scales stay alike."""
    results: dict[bool, list[Any]] = {}
    for number, way in enumerate(WAYS[:: world // 2]):
        model = fully_sharded()
        scales = train(way, model, rank, number % 2)
        assert scales == [SCALE, SCALE / 2, SCALE / 2], (way, scales)
        values = [whole(param) for param in model.parameters()]
        expected = results.setdefault(way[2] != "", values)
        for mine, other in zip(values, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=str(way))


@on_ranks(2)
def test_flags_that_differ(rank: int, world: int) -> None:
    """A step that clips agrees on the flag that it is given, too: no rank waits for another."""
    mesh = init_device_mesh("cpu", (world,))
    param: Any = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = faststep.optim.SGD([param], lr=1.0, max_grad_norm=1.0)
    for bad_rank in (0, world - 1, -1):
        param.grad = torch.full_like(param, 3.0)
        optimizer.grad_scale = torch.tensor(2.0)
        optimizer.found_inf = torch.tensor(float(rank == bad_rank))
        before = locals_of([param])[0]
        optimizer.step()
        assert optimizer.step_was_skipped == (bad_rank >= 0)
        assert torch.equal(before, locals_of([param])[0]) == (bad_rank >= 0)


@on_ranks(2)
def test_unscaled(rank: int, world: int) -> None:
    """`unscale_` of uneven and empty parts, with the bits of the same on plain tensors."""
    model = fully_sharded()
    backward(model, rank, 0, SCALE)
    twins = Twins(model.parameters(), torch.optim.SGD, lr=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    twins.step()
    scaler, other = (faststep.amp.GradScaler("cpu", init_scale=SCALE * 0.7) for _ in range(2))
    for one, who in ((scaler, optimizer), (other, twins.optimizer)):
        one.scale(torch.zeros(()))
        one.unscale_(who)
    for param, plain in zip(twins.params, twins.plain, strict=True):
        assert torch.equal(local(param.grad), plain.grad)
    half: Any = nn.Parameter(next(iter(model.parameters())).detach().half())
    half.grad = torch.ones_like(half)
    scaler = faststep.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.zeros(()))
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(torch.optim.SGD([half], lr=0.1))
