"""Compiled models, groups of some ranks only, and several dtypes in one optimizer."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import faststep
import faststep.optim
from ranks import assert_alike, on_ranks

from .common import Twins, backward, fully_sharded, local, locals_of, whole
from .test_clipping import counted, exact_norm

LIMIT = 0.3


@on_ranks(2)
def test_compiled(rank: int, world: int) -> None:
    """torch.compile over FSDP2 trains as torch's eager model and optimizer do."""
    model, other = fully_sharded(), fully_sharded()
    fast = torch.compile(model, backend="aot_eager")
    optimizer = faststep.optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=LIMIT)
    reference = torch.optim.AdamW(other.parameters(), lr=0.1)
    for step in range(3):
        backward(fast, rank, step, 4.0)  # type: ignore[arg-type]
        backward(other, rank, step, 4.0)
        norm: Any = nn.utils.clip_grad_norm_(other.parameters(), LIMIT)
        optimizer.step()
        reference.step()
        torch.testing.assert_close(optimizer.last_grad_norm, norm.full_tensor())
        for one in (optimizer, reference):
            one.zero_grad()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(local(mine), local(theirs), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_compiled_loop(rank: int, world: int) -> None:
    """A whole training step inside torch.compile, with our step and scaler."""
    model, other = fully_sharded(), fully_sharded()
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=LIMIT)
    plain = faststep.optim.SGD(other.parameters(), lr=0.1, max_grad_norm=LIMIT)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    fast = torch.compile(step, backend="eager")
    for number in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + number))
        fast(x)
        backward(other, rank, number)
        plain.step()
        plain.zero_grad()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(local(mine), local(theirs))


@on_ranks(4)
def test_one_of_two_meshes(rank: int, world: int) -> None:
    """Each half of the ranks trains by itself; what it clips by is its own norm."""
    halves = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("half", "shard"))
    mesh = halves["shard"]
    param: Any = nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Shard(0)]))
    param.grad = torch.full_like(param, 1.0 + rank // (world // 2))
    optimizer = faststep.optim.SGD([param], lr=1.0, max_grad_norm=1.0)
    with counted() as groups:
        optimizer.step()
        norm = faststep.clip_grad_norm_([param], 1.0)
    assert groups == [mesh.get_group()] * 2
    expected = 6.0**0.5 * (1.0 + rank // (world // 2))
    assert optimizer.last_grad_norm.item() == pytest.approx(expected)
    assert norm.item() == pytest.approx(expected)


@on_ranks(4)
def test_some_ranks_only(rank: int, world: int) -> None:
    """A mesh of the first two ranks, in an optimizer that the others do not have."""
    mesh = DeviceMesh("cpu", torch.arange(2))
    if rank < 2:
        param: Any = nn.Parameter(distribute_tensor(torch.ones(5), mesh, [Shard(0)]))
        param.grad = torch.ones_like(param)
        optimizer = faststep.optim.SGD([param], lr=1.0)
        scaler = faststep.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer, max_norm=0.5)
        scaler.update()
        norm = 5.0**0.5 / 2.0
        assert optimizer.last_grad_norm.item() == pytest.approx(norm)
        torch.testing.assert_close(whole(param), torch.full((5,), 1.0 - 0.5 / norm / 2.0))
    dist.barrier()


@on_ranks(2, 4)
def test_several_dtypes(rank: int, world: int) -> None:
    """On two meshes, beside plain ones: one norm, in the promoted dtype."""
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2))
    params: list[Any] = []
    for at, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.float16)):
        source = torch.Generator().manual_seed(at)
        values = torch.randn(5, 3, generator=source).to(dtype)
        params += [
            nn.Parameter(distribute_tensor(values.clone(), line, [Shard(0)])),
            nn.Parameter(distribute_tensor(values.clone(), square, [Shard(1), Replicate()])),
            nn.Parameter(values.clone()),
        ]
    for param in params:
        param.grad = (param.detach() * 3).requires_grad_(False)
    optimizer = faststep.optim.AdamW(params, lr=0.1, max_grad_norm=1e6)
    twins = Twins(params, faststep.optim.AdamW, lr=0.1)
    norm = exact_norm(params)
    twins.step()
    optimizer.step()
    twins.check(optimizer)
    assert optimizer.last_grad_norm.item() == pytest.approx(norm, rel=1e-6)
    found: Any = faststep.clip_grad_norm_(params, LIMIT)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(norm, rel=1e-6)
    assert_alike([local(found)])
    factor = LIMIT / (norm + 1e-6)
    for param, start in zip(params, twins.plain, strict=True):
        assert param.grad.dtype == param.dtype == start.dtype
    small = [grad.double() for grad in locals_of([params[4].grad, params[9].grad])]
    assert all(bool(grad.isfinite().all()) for grad in small)
    assert exact_norm(params) == pytest.approx(norm * factor, rel=1e-2)
