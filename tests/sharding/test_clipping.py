"""Norms of gradients of which each rank has a part: those of all parts, by one small collective."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import faststep
import faststep.optim
from ranks import assert_alike, on_ranks

from .common import Twins, backward, fully_sharded, local, locals_of, whole

STEPS = 2
LIMIT = 0.3
ORDERS = (1.0, 2.0, 3.5, math.inf)


@contextlib.contextmanager
def counted() -> Iterator[list[Any]]:
    """The process groups over which something is added up."""
    groups: list[Any] = []
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert tensor.numel() < 16
        groups.append(kwargs["group"])
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield groups
    finally:
        dist.all_reduce = original


def exact_norm(params: Any, order: float = 2.0) -> float:
    grads = [whole(param.grad).double().flatten() for param in params if param.grad is not None]
    return float(torch.linalg.vector_norm(torch.cat(grads), order))


def mixed_params(world: int) -> list[Any]:
    """On several meshes, divided over none to two process groups, and plain ones."""
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    layouts: list[Any] = [
        (line, [Shard(0)]),
        (line, [Replicate()]),
        None,
        (square, [Shard(0), Shard(1)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(1), Replicate()]),
    ]
    made: list[Any] = [
        values.clone() if one is None else distribute_tensor(values.clone(), *one)
        for one in layouts
    ]
    made.append(distribute_tensor(torch.ones(()), line, [Replicate()]))
    made.append(distribute_tensor(torch.ones(0, 3), line, [Shard(0)]))
    params = [nn.Parameter(one) for one in made]
    give_grads(params, 0)
    return params


def give_grads(params: list[Any], step: int) -> None:
    source = torch.Generator().manual_seed(step)
    for at, param in enumerate(params):
        values = (at + 1) * torch.randn(param.shape, generator=source)
        placed = isinstance(param, DTensor)
        param.grad = (
            distribute_tensor(values, param.device_mesh, param.placements) if placed else values
        )


def clip_twins(twins: Twins, norm: float) -> None:
    """A step on the plain shards by gradients that are clipped by hand."""
    factor = min(1.0, LIMIT / (norm + 1e-6))
    grads = [param.grad for param in twins.params]
    for param in twins.params:
        if param.grad is not None:
            param.grad = param.grad * factor
    twins.step()
    for param, grad in zip(twins.params, grads, strict=True):
        param.grad = grad


def check_twins(twins: Twins) -> None:
    for param, plain in zip(twins.params, twins.plain, strict=True):
        torch.testing.assert_close(locals_of([param])[0], plain.data, rtol=1e-4, atol=1e-5)


@on_ranks(2, 4)
def test_in_the_step(rank: int, world: int) -> None:
    """FSDP2: `max_grad_norm` clips by the norm of all, with one collective per step."""
    for name, options in (("AdamW", {}), ("SGD", {"momentum": 0.9})):
        cls = getattr(faststep.optim, name)
        model = fully_sharded()
        optimizer = cls(model.parameters(), lr=0.1, max_grad_norm=LIMIT, **options)
        twins = Twins(model.parameters(), cls, lr=0.1, **options)
        for step in range(STEPS):
            backward(model, rank, step, 4.0)
            norm = exact_norm(model.parameters())
            assert norm > LIMIT
            clip_twins(twins, norm)
            before = locals_of(param.grad for param in model.parameters())
            with counted() as groups:
                optimizer.step()
            assert len(groups) == 1
            assert optimizer.last_grad_norm.item() == pytest.approx(norm, rel=1e-6)
            assert_alike([optimizer.last_grad_norm])
            check_twins(twins)
            after = locals_of(param.grad for param in model.parameters())
            assert all(map(torch.equal, before, after))
            optimizer.zero_grad()
        backward(model, rank, 9, 4.0)
        optimizer.keep_grads = True
        optimizer.step()
        assert exact_norm(model.parameters()) == pytest.approx(LIMIT, rel=1e-4)


@on_ranks(4)
def test_hybrid(rank: int, world: int) -> None:
    """A replicated part counts once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_sharded(mesh=mesh)
    optimizer = faststep.optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=LIMIT)
    for step in range(STEPS):
        backward(model, rank, step)
        norm = exact_norm(model.parameters())
        with counted() as groups:
            optimizer.step()
        assert groups == [mesh.get_group("shard")]
        assert optimizer.last_grad_norm.item() == pytest.approx(norm, rel=1e-6)
        assert_alike([optimizer.last_grad_norm])
        assert faststep.clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(norm)
        optimizer.zero_grad()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(6), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return out


@on_ranks(4)
def test_two_dimensional(rank: int, world: int) -> None:
    """FSDP2 over one dimension of a mesh, tensor parallelism over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Block(), mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    kinds = {param.placements for param in model.parameters()}
    assert {len(kind) for kind in kinds} == {1, 2}
    optimizer = faststep.optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=LIMIT)
    twins = Twins(model.parameters(), faststep.optim.AdamW, lr=0.1)
    for step in range(STEPS):
        backward(model, rank // 2, step, 9.0)
        norm = exact_norm(model.parameters())
        clip_twins(twins, norm)
        with counted() as groups:
            optimizer.step()
        assert len(groups) == len(set(groups)) == 2
        assert optimizer.last_grad_norm.item() == pytest.approx(norm, rel=1e-6)
        assert_alike([optimizer.last_grad_norm])
        check_twins(twins)
        found = faststep.clip_grad_norm_(model.parameters(), 1.0)
        assert found.item() == pytest.approx(norm, rel=1e-6)
        optimizer.zero_grad()


@on_ranks(2, 4)
def test_several_meshes(rank: int, world: int) -> None:
    """One collective per process group; plain tensors and replicated ones count once."""
    params = mixed_params(world)
    groups = [{"params": params[:4]}, {"params": params[4:], "lr": 0.2}]
    optimizer = faststep.optim.AdamW(groups, lr=0.1, max_grad_norm=LIMIT)
    twins = Twins(params, faststep.optim.AdamW, lr=0.1)
    twins.optimizer = faststep.optim.AdamW(
        [{"params": twins.plain[:4]}, {"params": twins.plain[4:], "lr": 0.2}], lr=0.1
    )
    for step in range(5):
        give_grads(params, step)
        if step == 2:
            params[3].grad = params[1].grad = params[2].grad = None
        if step == 3:  # a parameter is swapped for one that is divided in another way
            here = params[0].device_mesh
            new: Any = nn.Parameter(distribute_tensor(torch.ones(4, 4), here, [Shard(1)]))
            new.grad = torch.full_like(new, 3.0)
            optimizer.param_groups[0]["params"][0] = twins.params[0] = params[0] = new
            plain = nn.Parameter(locals_of([new])[0])
            twins.optimizer.param_groups[0]["params"][0] = twins.plain[0] = plain
        norm = exact_norm(params)
        clip_twins(twins, norm)
        with counted() as seen:
            optimizer.step()
        meshes = params[0].device_mesh, params[3].device_mesh
        expected = {mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)}
        expected -= {group for group in expected if dist.get_world_size(group) == 1}
        assert len(seen) == len(expected)
        assert set(seen) == expected
        assert optimizer.last_grad_norm.item() == pytest.approx(norm, rel=1e-6)
        assert_alike([optimizer.last_grad_norm])
        check_twins(twins)


@on_ranks(2)
def test_on_one_rank_only(rank: int, world: int) -> None:
    """A rank without any gradient takes part, from the first step on."""
    mesh = init_device_mesh("cpu", (world,))
    param: Any = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = faststep.optim.SGD([param], lr=1.0, max_grad_norm=1.0)
    for _ in range(2):
        param.grad = torch.full_like(param, 3.0) if rank == 0 else None
        optimizer.step()
        norm = math.sqrt(9.0 * locals_of([param])[0].numel())
        if rank == 0:
            assert optimizer.last_grad_norm.item() == pytest.approx(norm)
        assert_alike([optimizer.last_grad_norm])


@on_ranks(2, 4)
def test_by_functions(rank: int, world: int) -> None:
    """The four functions on gradients of several meshes, for every order of the norm."""
    for order, limit in zip(ORDERS, (0.3, 1e6, 0.3, 0.3), strict=True):
        params = mixed_params(world)
        norm = exact_norm(params, order)
        versions = [(p.grad._version, local(p.grad)._version) for p in params]
        before = [whole(param.grad) for param in params]
        with counted() as groups:
            found = faststep.clip_grad_norm_(params, limit, order)
        assert len(groups) == len(set(groups))
        assert type(found) is DTensor
        assert found.item() == pytest.approx(norm, rel=1e-6)
        assert torch.equal(found.full_tensor(), found.to_local())
        assert_alike([found.to_local()])
        factor = min(1.0, limit / (norm + 1e-6))
        for param, grad in zip(params, before, strict=True):
            torch.testing.assert_close(whole(param.grad), grad * factor)
        if factor < 1.0:
            moved = [(p.grad._version, local(p.grad)._version) for p in params]
            assert all(a < b and c < d for (a, c), (b, d) in zip(versions, moved, strict=True))
        params = mixed_params(world)
        grads = [param.grad for param in params]
        total = faststep.get_total_norm(grads, order)
        assert total.item() == pytest.approx(norm, rel=1e-6)
        assert all(torch.equal(whole(grad), old) for grad, old in zip(grads, before, strict=True))
        faststep.clip_grads_with_norm_(params, 0.5, total)
        assert exact_norm(params, order) == pytest.approx(0.5, rel=1e-4)
        faststep.clip_grad_value_(params, 0.01)
        for param, old in zip(params, before, strict=True):
            clipped = (old * min(1.0, 0.5 / (norm + 1e-6))).clamp(-0.01, 0.01)
            torch.testing.assert_close(whole(param.grad), clipped)


@on_ranks(2, 4)
def test_as_torch(rank: int, world: int) -> None:
    """torch's own functions on a model of FSDP2, among them an order that is torch's affair.

    torch's norm of order inf raises on ranks with an empty part, and the others wait for them.
    """
    for order in (1.0, 2.0, 3.5, 0.0):
        results = []
        for module in (faststep, nn.utils):
            model = fully_sharded()
            backward(model, rank, 0, 3.0)
            norm: Any = module.clip_grad_norm_(model.parameters(), 0.2, order)
            assert type(norm) is DTensor
            if order > 0.0:
                again: Any = module.get_total_norm([p.grad for p in model.parameters()], order)
                module.clip_grads_with_norm_(model.parameters(), 0.1, again)
            module.clip_grad_value_(model.parameters(), 0.01)
            results.append([norm.full_tensor(), *(whole(p.grad) for p in model.parameters())])
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, equal_nan=True)
    model = fully_sharded()
    backward(model, rank, 0)
    total: Any = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    faststep.clip_grads_with_norm_(model.parameters(), 0.1, total)
    assert exact_norm(model.parameters()) == pytest.approx(0.1, rel=1e-4)
    assert faststep.clip_grad_norm_(list(nn.Linear(1, 1).parameters()), 1.0) == 0.0


@on_ranks(2)
def test_not_finite(rank: int, world: int) -> None:
    """An infinite or undefined element on one rank is one for all.

    Over gloo torch's norm of order inf differs from rank to rank then.
    """
    mesh = init_device_mesh("cpu", (world,))
    large: Any = nn.Parameter(distribute_tensor(torch.ones(1000).half(), mesh, [Shard(0)]))
    large.grad = torch.full_like(large, 6e4)
    with pytest.raises(RuntimeError, match="non-finite"):  # in fp16, in which it is returned
        faststep.clip_grad_norm_([large], 1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match="non-finite"):
        faststep.get_total_norm([large.grad], error_if_nonfinite=True)
    assert (local(large.grad) == 6e4).all()
    for bad in (math.inf, math.nan):
        for order in (2.0, math.inf):
            results = []
            for module in (faststep, nn.utils) if order == 2.0 else (faststep,):
                param: Any = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
                param.grad = torch.ones_like(param)
                if rank == world - 1:
                    local(param.grad)[0] = bad
                text = "non-finite"
                with pytest.raises(RuntimeError, match=text):
                    module.clip_grad_norm_([param], 1.0, order, error_if_nonfinite=True)
                norm: Any = module.clip_grad_norm_([param], 1.0, order)
                results.append((norm.full_tensor(), whole(param.grad)))
            mine, *others = results
            expected = torch.full((4,), math.nan if math.isnan(bad) else 0.0)
            expected[2 * world - 2] = math.nan
            torch.testing.assert_close(mine[0], torch.tensor(bad), equal_nan=True)
            torch.testing.assert_close(mine[1], expected, equal_nan=True)
            for other in others:
                torch.testing.assert_close(list(mine), list(other), equal_nan=True)


@on_ranks(2)
def test_sums_that_wait(rank: int, world: int) -> None:
    """`Partial` gradients are added over the ranks before anything is measured."""
    mesh = init_device_mesh("cpu", (world,))
    values = torch.arange(15.0).reshape(5, 3)
    total = values * sum(range(1, world + 1))
    norm = float(total.norm())

    def param() -> Any:
        made: Any = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)]))
        made.grad = DTensor.from_local(values * (rank + 1), mesh, [Partial()])
        return made

    one = param()
    assert faststep.get_total_norm([one.grad]).item() == pytest.approx(norm)
    assert one.grad.placements[0].is_partial()
    assert faststep.clip_grad_norm_([one], 2.0).item() == pytest.approx(norm)
    torch.testing.assert_close(whole(one.grad), total * (2.0 / norm))
    two = param()
    faststep.clip_grad_value_([two], 7.0)
    torch.testing.assert_close(whole(two.grad), total.clamp(-7.0, 7.0))
    three = param()
    optimizer = faststep.optim.SGD([three], lr=1.0, max_grad_norm=2.0)
    optimizer.step()
    assert optimizer.last_grad_norm.item() == pytest.approx(norm)
    torch.testing.assert_close(whole(three), -total * (2.0 / norm))


@on_ranks(2)
def test_watched(rank: int, world: int) -> None:
    """Inside a TorchDispatchMode torch's operators do it all, with the same norm on all ranks."""
    results = []
    for watch in (False, True):
        model = fully_sharded()
        optimizer = faststep.optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=LIMIT)
        scaler = faststep.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        skipped = []
        for step in range(3):
            backward(model, rank, step, 4.0)
            if step == 1 and rank == 0:
                local(next(iter(model.parameters())).grad)[0, 0] = math.inf
            with CommDebugMode() if watch else contextlib.nullcontext():
                scaler.step(optimizer)
            scaler.update(4.0)
            skipped.append(optimizer.step_was_skipped)
            if step != 1:
                assert_alike([optimizer.last_grad_norm])
            optimizer.zero_grad()
        assert skipped == [False, True, False]
        results.append([optimizer.last_grad_norm, *map(whole, model.parameters())])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
