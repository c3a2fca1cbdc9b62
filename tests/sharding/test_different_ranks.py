"""Ranks with other gradients than the rest, or with one that cannot be used: nobody waits for them.

torch's functions wait until the timeout where a rank has no gradient at all.
"""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import faststep
import faststep.optim
from ranks import assert_alike, on_ranks

from .common import local, locals_of
from .test_clipping import counted, mixed_params

LIMIT = 0.5
SCALE = 8.0


def sharded(world: int, *names: str) -> list[Any]:
    """Parameters of 2 elements per rank, with gradients of 3."""
    mesh = init_device_mesh("cpu", (world,))
    made: list[Any] = [
        nn.Parameter(distribute_tensor(torch.ones(2 * world), mesh, [Shard(0)])) for _ in names
    ]
    for param in made:
        param.grad = torch.full_like(param, 3.0)
    return made


@on_ranks(2, 4)
def test_clip(rank: int, world: int) -> None:
    """The norm is that of the gradients that there are, on every rank."""
    for order in (2.0, math.inf, 1.0):
        params = sharded(world, "a", "b")
        if rank == world - 1:
            params[0].grad = params[1].grad = None
        with counted() as groups:
            norm: Any = faststep.clip_grad_norm_(params, LIMIT, order)
        assert len(groups) == 1
        count = 4 * (world - 1)
        exact = 3.0 if order == math.inf else (count * 3.0**order) ** (1.0 / order)
        assert type(norm) is DTensor
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(exact)
        assert_alike([norm.to_local()])
        if rank < world - 1:
            for param in params:
                torch.testing.assert_close(
                    local(param.grad), torch.full((2,), 3.0 * LIMIT / (exact + 1e-6))
                )
        else:
            assert params[0].grad is params[1].grad is None


@on_ranks(2)
def test_clip_without_any(rank: int, world: int) -> None:
    """As torch's: no norm, and no difference in what is returned."""
    params = sharded(world, "a")
    params[0].grad = None
    for module in (faststep, nn.utils):
        norm = module.clip_grad_norm_(params, LIMIT)
        assert type(norm) is Tensor
        assert torch.equal(norm, torch.tensor(0.0))


@on_ranks(2, 4)
def test_clip_without_those_of_a_mesh(rank: int, world: int) -> None:
    """The last rank has no gradients on one of the meshes, or of none that is divided over all."""
    for missing in ((0,), (3,), (0, 3)):
        params = mixed_params(world)
        if rank == world - 1:
            for at in missing:
                params[at].grad = None
        with counted() as groups:
            norm = faststep.clip_grad_norm_(params, 1e9)
        counts: list[Any] = [None] * world
        dist.all_gather_object(counts, len(groups))
        assert len(groups) > 0
        assert len(set(counts)) == 1
        assert_alike([local(norm)])


@on_ranks(2)
def test_scaled(rank: int, world: int) -> None:
    """An overflow on one rank counts on the rank without gradients: scales stay alike."""
    ways: list[tuple[Any, str, dict[str, Any]]] = [
        (torch.optim.AdamW, "", {}),
        (torch.optim.AdamW, "by hand", {}),
        (torch.optim.AdamW, "by the scaler", {}),
        (torch.optim.AdamW, "", {"fused": True}),
        (faststep.optim.SGD, "", {}),
        (faststep.optim.SGD, "by hand", {}),
        (faststep.optim.SGD, "by the scaler", {}),
        (faststep.optim.SGD, "", {"max_grad_norm": LIMIT}),
    ]
    for cls, how, options in ways:
        for bad in (False, True):
            params = sharded(world, "a")
            optimizer = cls(params, lr=1.0, **options)
            scaler = faststep.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
            scaler.scale(torch.zeros(()))
            if rank == world - 1:
                params[0].grad = None
            elif bad and rank == 0:
                local(params[0].grad)[1] = math.inf
            before = locals_of(params)[0]
            if how == "by hand":
                scaler.unscale_(optimizer)
                faststep.clip_grad_norm_(params, LIMIT)
            scaler.step(optimizer, **({"max_norm": LIMIT} if how == "by the scaler" else {}))
            scaler.update()
            assert scaler.get_scale() == (SCALE / 2 if bad else SCALE), (cls, how, options)
            same = torch.equal(before, locals_of(params)[0])
            assert same == (bad or rank == world - 1), (cls, how, options)


@on_ranks(2)
def test_scaled_without_any(rank: int, world: int) -> None:
    """torch's error where no rank has a gradient."""
    for cls in (torch.optim.SGD, faststep.optim.SGD):
        params = sharded(world, "a")
        params[0].grad = None
        optimizer = cls(params, lr=1.0)
        scaler = faststep.amp.GradScaler("cpu", init_scale=SCALE)
        scaler.scale(torch.zeros(()))
        with pytest.raises(AssertionError, match="No inf checks were recorded for this"):
            scaler.step(optimizer)


def bad_on_one_rank(rank: int, world: int, cls: Any = faststep.optim.SGD) -> list[Any]:
    """A plain parameter beside the DTensors has a sparse gradient on the last rank."""
    params = [*sharded(world, "a", "b"), nn.Parameter(torch.ones(3))]
    params[2].grad = torch.ones(3)
    if rank == world - 1:
        params[2].grad = torch.ones(3).to_sparse()
    return params


def refused(rank: int, world: int, own: type[Exception], text: str) -> Any:
    """The error of the bad rank, and that of the others, which names the rank."""
    if rank == world - 1:
        return pytest.raises(own, match=text)
    return pytest.raises(RuntimeError, match=rf"(?s)rank {world - 1}.*{text}")


@on_ranks(2, 4)
def test_step_that_fails_on_one_rank(rank: int, world: int) -> None:
    """At the first step and at a later one; nothing is updated anywhere."""
    for before_it in (0, 2):
        params = bad_on_one_rank(rank, world)
        bad = params[2].grad
        named = [("first", params[0]), ("second", params[1]), ("third", params[2])]
        optimizer = faststep.optim.SGD(named, lr=0.1, momentum=0.9, max_grad_norm=1.0)
        params[2].grad = torch.ones(3)
        for _ in range(before_it):
            optimizer.step()
        params[2].grad = bad
        values = locals_of(params)
        with refused(rank, world, RuntimeError, "'third'.*nothing was updated"):
            optimizer.step()
        assert all(map(torch.equal, values, locals_of(params)))
        params[2].grad = torch.ones(3)
        optimizer.step()
        assert_alike([optimizer.last_grad_norm])
        assert not torch.equal(values[2], params[2].detach())


@on_ranks(2)
def test_function_that_fails_on_one_rank(rank: int, world: int) -> None:
    for order in (2.0, math.inf):
        params = bad_on_one_rank(rank, world)
        grads = [param.grad for param in params]
        values = locals_of(grads[:2])
        with refused(rank, world, RuntimeError, "tensor|gradient"):
            faststep.clip_grad_norm_(params, 1.0, order)
        with refused(rank, world, RuntimeError, "tensor|gradient"):
            faststep.get_total_norm(grads, order)
        assert all(map(torch.equal, values, locals_of(grads[:2])))


@on_ranks(2)
def test_unscale_that_fails_on_one_rank(rank: int, world: int) -> None:
    params = bad_on_one_rank(rank, world)
    scaler = faststep.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.zeros(()))
    values = locals_of(param.grad for param in params[:2])
    with refused(rank, world, RuntimeError, "gradient"):
        scaler.unscale_(torch.optim.SGD(params, lr=0.1))
    assert all(map(torch.equal, values, locals_of(param.grad for param in params[:2])))
    half = [nn.Parameter(param.detach().half()) for param in sharded(world, "a", "b")]
    if rank == world - 1:
        for param in half:
            param.grad = torch.ones_like(param)
    scaler = faststep.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.zeros(()))
    with refused(rank, world, ValueError, "FP16"):
        scaler.unscale_(torch.optim.SGD(half, lr=0.1))
