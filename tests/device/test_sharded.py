"""Sharded steps on the fake device, against the fused optimizer on the same mean gradients."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from faststep import zero
from ranks import on_cuda_cases
from zero.common import OTHERS, Place
from zero.test_exact import LOW, check_run

from . import fake, nccl

KB = 1 / 1024  # MiB


@contextlib.contextmanager
def machine() -> Iterator[nccl.Nccl]:
    """A fake machine for one job, of which nobody complains."""
    with pytest.MonkeyPatch.context() as patch:
        started = fake.start(patch)
        assert started.complaint() is None
        ranks = nccl.start(patch, started)
        yield ranks
        ranks.close()
        fake.free_allocated()
        assert started.complaint() is None


def on_device(model: nn.Module) -> nn.Module:
    for name, param in list(model.named_parameters(recurse=False)):
        moved = torch.empty_strided(param.size(), param.stride(), dtype=param.dtype)
        moved.copy_(param.detach())
        setattr(model, name, nn.Parameter(fake.claim(moved)))
    for child in model.children():
        on_device(child)
    return model


def backward(loss: torch.Tensor) -> None:
    """Hooks then see torch's functions as the script does, which a subclass would turn off."""
    loss.as_subclass(torch.Tensor).backward()


@contextlib.contextmanager
def without_waiting(is_wanted: bool) -> Iterator[None]:
    fake.waiting_is_an_error = is_wanted
    try:
        yield
    finally:
        fake.waiting_is_an_error = False


DEVICE = Place(on_device, fake.claim, backward, without_waiting)


BASE = {"optimizer": "AdamW", "stage": 2, "mb": 0.1}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{
        f"AdamW on {world}, {mb} MiB": (world, {**BASE, "mb": mb})
        for world, mb in ((1, 0.1), (2, KB), (2, 0.1), (3, 0.1), (3, math.inf))
    },
    "stage 1": (2, {**BASE, "stage": 1}),
    "unused": (3, {**BASE, "unused": True, "mb": KB}),
    "momentum": (2, {**BASE, "optimizer": "momentum"}),
    "Lion": (2, {**BASE, "optimizer": "Lion", "groups": True}),
    **{name: (2, {**BASE, "optimizer": name, "dtypes": LOW}) for name in OTHERS},
    "int8": (3, {**BASE, "optimizer": "int8", "clip": 1.0, "dtypes": LOW}),
    "int8, stage 1": (2, {**BASE, "optimizer": "int8", "stage": 1, "mb": KB}),
    "several dtypes": (3, {**BASE, "dtypes": LOW}),
    "clipped": (3, {**BASE, "clip": 1.0}),
    "clipped, one bucket": (2, {**BASE, "clip": 1e-6, "mb": math.inf, "stage": 1}),
    "clipped, small buckets": (4, {**BASE, "clip": 1.0, "mb": KB, "unused": True}),
    "clipped by hand": (2, {**BASE, "clip": 1.0, "how": "by hand", "dtypes": LOW}),
    "clipped alone": (1, {**BASE, "clip": 1.0}),
    "2 nodes": (4, {**BASE, "clip": 1.0, "nodes": 2, "unused": True}),
    "learning rate on the device": (2, {**BASE, "clip": 1.0, "lr": True}),
    "in forward": (2, {**BASE, "clip": 1.0, "gather": "forward"}),
    "in forward, stage 1": (3, {**BASE, "gather": "forward", "stage": 1, "dtypes": LOW}),
    "little room": (2, {**BASE, "mb": KB, "room": 50_000}),
}


@on_cuda_cases((world, name) for name, (world, _) in CASES.items())
def test_bits_of_one_process(rank: int, world: int, name: str) -> None:
    case = CASES[name][1]
    with machine(), pytest.MonkeyPatch.context() as patch:
        if "room" in case:
            patch.setattr(zero.hooks.reducer, "MOST_UNDER_WAY", case["room"])
        check_run(rank, world, {"steps": 6, **case}, DEVICE)
