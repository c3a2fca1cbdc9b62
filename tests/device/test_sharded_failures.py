"""Backward passes that fail on the fake device, on one rank or on all."""

import contextlib

import pytest
import torch
from torch import Tensor

import faststep
from faststep import zero
from ranks import on_cuda_ranks
from zero.common import SHAPES, Given, differences, grads_for, mean_of

from . import fake
from .test_sharded import backward, machine, on_device


class _PlantedError(Exception):
    pass


def _plant(_: Tensor) -> None:
    raise _PlantedError


def _fails(model: Given, grads: list[Tensor], place: int) -> None:
    handle = list(model.parameters())[place].register_hook(_plant)
    with contextlib.suppress(_PlantedError):
        backward(model(grads))
    handle.remove()


@on_cuda_ranks(2)
def test_all_ranks_fail_and_go_on(rank: int, world: int) -> None:
    """A pass that fails on all ranks before anything was sent, and what follows."""
    with machine():
        model, whole = on_device(Given(SHAPES, [torch.float32])), Given(SHAPES, [torch.float32])
        optimizer = zero.shard(
            model, faststep.optim.AdamW(model.parameters(), lr=0.01), bucket_mb=0.1
        )
        reference = faststep.optim.AdamW(whole.parameters(), lr=0.01)
        for step in range(3):
            if step == 1:
                _fails(model, grads_for(model, rank, 9), 7)
                optimizer.zero_grad()
            backward(model(grads_for(model, rank, step)))
            parts = [grads_for(whole, r, step) for r in range(world)]
            for param, rows in zip(whole.parameters(), zip(*parts, strict=True), strict=True):
                param.grad = mean_of(rows)
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
        values = [fake.plain(param) for param in model.parameters()]
        assert differences(values, whole.parameters()) == []


@on_cuda_ranks(2)
def test_the_other_rank_hears_before_its_next_pass(rank: int, world: int) -> None:
    """The last rank fails after some buckets were sent; the other one does not wait for it."""
    with machine():
        model = on_device(Given(SHAPES, [torch.float32]))
        optimizer = zero.shard(
            model, faststep.optim.SGD(model.parameters(), lr=0.1), bucket_mb=0.01
        )
        if rank:
            _fails(model, grads_for(model, rank, 1), 2)
            optimizer.zero_grad()
            return
        backward(model(grads_for(model, rank, 1)))
        optimizer.zero_grad()
        text = "the backward pass before this one has failed on another rank"
        with pytest.raises(RuntimeError, match=text):
            backward(model(grads_for(model, rank, 2)))
