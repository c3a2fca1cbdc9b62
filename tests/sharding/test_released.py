"""Gradient release with models of fully_shard: the bits of a step after backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import faststep
from ranks import on_ranks

from .common import backward, fully_sharded, locals_of
from .test_optimizers import CLASSES, FIVE, Block

STEPS = 3


def check_alike(
    make: Callable[[], nn.Module], rank: int, name: str = "adamw", micro_steps: int = 1, **more: Any
) -> None:
    """Released beside a step after backward; the gradients of each block are gone within it."""
    cls, options = CLASSES[name]
    released, plain = make(), make()
    ours, theirs = (
        getattr(faststep.optim, cls)(model.parameters(), **options, **more)
        for model in (released, plain)
    )
    release = faststep.release_gradients(released, ours)
    for step in range(STEPS):
        for model, optimizer in ((released, ours), (plain, theirs)):
            for micro_step in range(micro_steps):
                model.set_requires_gradient_sync(micro_step == micro_steps - 1)
                backward(model, rank, micro_steps * step + micro_step)
            freed = [param.grad is None for param in model.parameters()]
            assert all(freed) if model is released else not any(freed)
            optimizer.step()
            optimizer.zero_grad()
        for mine, other in zip(released.parameters(), plain.parameters(), strict=True):
            assert torch.equal(*locals_of([mine, other]))
            assert list(ours.state[mine]) == list(theirs.state[other])
            for key, value in ours.state[mine].items():
                assert torch.equal(*locals_of([value, theirs.state[other][key]])), key
    release.remove()
    backward(released, rank, 0)
    assert all(param.grad is not None for param in released.parameters())


@on_ranks(2, 4)
def test_fsdp2(rank: int, world: int) -> None:
    for name in CLASSES if world == 2 else FIVE:
        check_alike(fully_sharded, rank, name)


@on_ranks(2)
def test_options_of_fully_shard(rank: int, world: int) -> None:
    offload = CPUOffloadPolicy(pin_memory=False)
    check_alike(lambda: fully_sharded(offload_policy=offload), rank)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check_alike(lambda: fully_sharded(mp_policy=policy), rank)
    check_alike(lambda: fully_sharded(reshard_after_forward=False), rank)
    check_alike(lambda: fully_shard(Block()), rank)


@on_ranks(4)
def test_hybrid(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_alike(lambda: fully_sharded(mesh=mesh), rank)


@on_ranks(2)
def test_micro_steps(rank: int, world: int) -> None:
    check_alike(fully_sharded, rank, micro_steps=3)


@on_ranks(2)
def test_states_in_few_bits(rank: int, world: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # casts the inputs too
    make = lambda: fully_sharded(mp_policy=policy).bfloat16()  # noqa: E731
    check_alike(make, rank, master_weights="remainder16", state_dtype="bf16")
    check_alike(make, rank, master_weights="fp32")


@on_ranks(2)
def test_refused(rank: int, world: int) -> None:
    model = fully_sharded()
    optimizer = faststep.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    with pytest.raises(ValueError, match="norms of whole gradients"):
        faststep.release_gradients(model, optimizer, clip="per_parameter")
    other = faststep.optim.AdamW(fully_sharded().named_parameters())
    with pytest.raises(TypeError, match=r"'0.weight'.* is a DTensor"):
        faststep.release_gradients(model, other)
    mesh = init_device_mesh("cpu", (world,))
    divided = parallelize_module(Block(), mesh, {"up": ColwiseParallel()})
    with pytest.raises(TypeError, match="is a DTensor"):
        faststep.release_gradients(divided, faststep.optim.AdamW(divided.parameters()))
    optimizer = faststep.optim.AdamW(model.parameters())
    release = faststep.release_gradients(model, optimizer)
    backward(model, rank, 0)
    with pytest.raises(RuntimeError, match="a second gradient"):
        backward(model, rank, 1)
    release.remove()
