"""Several sharded models in one process, and what they must not do to each other."""

from typing import Any

import torch
import torch.distributed as dist

import faststep
from faststep import zero
from ranks import on_ranks

from .common import Given, differences, error_of, grads_for, mean_of

SHAPES = [(300, 70), (70,), (20000,), (5, 5)]


@on_ranks(2, wrapped=(False, True))
def test_two_models_in_one_backward(rank: int, world: int, wrapped: bool) -> None:
    """One backward of two models, which each rank reaches in another order."""
    models = [Given(SHAPES, [torch.float32]) for _ in range(2)]
    wholes = [Given(SHAPES, [torch.float32]) for _ in range(2)]
    sharded: list[Any] = []
    for number, model in enumerate(models):
        outside: Any = model
        if wrapped and number == 0:
            outside = torch.nn.parallel.DistributedDataParallel(model)
        made = faststep.optim.SGD(model.parameters(), lr=1.0)
        sharded.append((outside, zero.shard(outside, made, bucket_mb=1e-3)))
    wrong = []
    for step in range(4):
        losses = [
            outside(grads_for(model, rank, step, number))
            for number, ((outside, _), model) in enumerate(zip(sharded, models, strict=True))
        ]
        if (rank + step) % 2:
            losses.reverse()
        sum(losses).backward()  # autograd goes through the last one first
        for number, whole in enumerate(wholes):
            rows = [grads_for(whole, r, step, number) for r in range(world)]
            with torch.no_grad():
                for param, parts in zip(whole.parameters(), zip(*rows, strict=True), strict=True):
                    param -= mean_of(parts)
        for number, (_, optimizer) in enumerate(sharded):
            optimizer.step()
            optimizer.zero_grad()
            moved = differences(models[number].parameters(), wholes[number].parameters())
            wrong += [f"step {step}, model {number}: p{n}" for n in moved]
    assert not wrong, wrong


@on_ranks(3)
def test_two_models_over_one_group(rank: int, world: int) -> None:
    """Two models over one group of some of the ranks."""
    group = dist.new_group([0, 1])
    if rank == 2:
        return
    models = [Given(SHAPES, [torch.float32]) for _ in range(2)]
    kept = [
        zero.shard(m, torch.optim.SGD(m.parameters(), lr=1.0), process_group=group) for m in models
    ]
    for model, optimizer in zip(models, kept, strict=True):  # one after the other
        model(grads_for(model, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    said = error_of(sum(model(grads_for(model, rank)) for model in models).backward)
    assert "sharded over the same process_group" in said, said


@on_ranks(2)
def test_connections_go_with_the_model(rank: int, world: int) -> None:
    """Process groups that are left when sharded models are gone."""
    known = dist.distributed_c10d._world.pg_map
    before = len(known)
    for _ in range(3):
        model = Given(SHAPES, [torch.float32])
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=1.0))
        model(grads_for(model, rank)).backward()
        optimizer.step()
        during = len(known)
        dist.barrier()
        del model, optimizer
        __import__("gc").collect()
    found = during - before, len(known) - before
    assert found == (1, 0), found
