"""The memory of an optimizer is freed with its last reference, without the garbage collector."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import faststep
import faststep.optim
import faststep.zero
from ranks import on_ranks

from .common import backward, fully_sharded, net

Made = tuple[nn.Module, Any]


def clipping() -> Made:
    model = fully_sharded()
    return model, faststep.optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)


def by_shard(stage: Any) -> Callable[[], Made]:
    def made() -> Made:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, faststep.zero.shard(model, optimizer, stage=stage, max_grad_norm=1.0)

    return made


def steps(rank: int, made: Callable[[], Made], scaled: bool) -> list[Callable[[], Any]]:
    """Train, and let go of the optimizer; what should be gone.

    The model stays: FSDP2 keeps it, and frames that called its backward.
    """
    model, optimizer = made()
    scaler = faststep.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for step in range(3):
        backward(model, rank, step, 4.0)
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    gone = [weakref.ref(optimizer), weakref.ref(states[-1])]
    del optimizer, states
    return gone


@pytest.mark.filterwarnings("ignore::UserWarning")
@on_ranks(2)
def test_freed(rank: int, world: int) -> None:
    gc.collect()
    gc.disable()
    try:
        for made in (clipping, by_shard(3)):
            for scaled in (False, True):
                left = [one() for one in steps(rank, made, scaled)]
                assert left == [None] * 2, (made, scaled, gc.get_referrers(left[0]))
    finally:
        gc.enable()


@on_ranks(2)
def test_alone(rank: int, world: int) -> None:
    """The same for one DTensor that is no part of a model."""
    mesh = init_device_mesh("cpu", (world,))
    gc.collect()
    gc.disable()
    try:
        param: Any = nn.Parameter(distribute_tensor(torch.ones(2 * world), mesh, [Shard(0)]))
        param.grad = torch.ones_like(param)
        optimizer = faststep.optim.AdamW([param], max_grad_norm=0.5)
        optimizer.step()
        gone = [weakref.ref(optimizer), weakref.ref(param), weakref.ref(optimizer._stepper)]
        del optimizer, param
        assert [one() for one in gone] == [None] * 3
    finally:
        gc.enable()
