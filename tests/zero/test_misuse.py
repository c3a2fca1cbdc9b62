"""What a script can do wrong, ranks that differ, and models with odd parameters."""

import gc
import pickle
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import faststep
from faststep import zero
from ranks import assert_alike, on_ranks

from .common import Given, check_error, differences, error_of, grads_for


def _is_freed() -> bool:
    """Whether model and optimizer go when nobody refers to them, with gradients in place."""
    model = Given([(50, 3), (4,)], [torch.float32])
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), gather="forward")
    model(grads_for(model, 1)).backward()
    optimizer.step()
    optimizer.wait()
    model(grads_for(model, 2)).backward()
    gone = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(optimizer._engine)]
    left = model.p0.grad
    del model, optimizer
    gc.collect()
    said = error_of(left.zero_)
    return all(one() is None for one in gone) and "the optimizer that had this" in said


@on_ranks(2)
def test_misuse(rank: int, world: int) -> None:
    model = Given([(50, 3), (4,)], [torch.float32])
    first = torch.optim.AdamW(model.parameters())
    optimizer = zero.shard(model, first)
    before = [p.detach().clone() for p in model.parameters()]
    params = list(model.parameters())
    grads = grads_for(model, rank)
    model(grads).backward()
    assert "p0" in repr(params[0].grad)
    adafactor, strange = torch.optim.Adafactor(params), nn.Linear(1, 1)
    for call, text in (
        (
            first.step,
            "RuntimeError: this AdamW was replaced by what faststep.zero.shard() returned",
        ),
        (lambda: pickle.dumps(optimizer), "TypeError: a sharded optimizer cannot be pickled"),
        (
            lambda: zero.shard(model, optimizer),
            "TypeError: shard(): this optimizer is sharded already",
        ),
        (lambda: zero.shard(model, adafactor), "TypeError: shard() takes ASGD"),
        (lambda: zero.shard(model, first, stage=4), "ValueError: stage must be 1, 2 or 3"),  # type: ignore[arg-type]
        (
            lambda: zero.shard(strange, first),
            "ValueError: shard(): 2 parameters of the optimizer are not in the model",
        ),
    ):
        check_error(call, text)
    wrapper = DistributedDataParallel(nn.Linear(1, 1))
    wrapper.register_comm_hook(None, lambda _, bucket: bucket)
    sgd = torch.optim.SGD(wrapper.parameters())
    text = "TypeError: shard(): the DistributedDataParallel model has a communication"
    check_error(lambda: zero.shard(wrapper, sgd), text)
    assert differences(before, model.parameters()) == []
    optimizer.zero_grad()
    optimizer.step()
    assert _is_freed()
    with pytest.raises(TypeError, match=r"^accumulate\(\) takes a sharded optimizer alone"):
        faststep.accumulate([optimizer, sgd], 2)
    with pytest.raises(TypeError, match=r"^accumulate\(\) with dtype= of a sharded opt"):
        faststep.accumulate(optimizer, 2, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"not .*ShardedOptimizer"):
        faststep.release_gradients(model, optimizer)


DIFFERENCES = {
    "shape": "'p1'",
    "dtype": "'p1'",
    "frozen": "'p1'",
    "order": "'p0'",
    "number": "'p3'",
    "optimizer": "Adam",
    "version": "rank 1 has faststep 9.9, torch ",
}


@on_ranks(3)
def test_ranks_that_differ_are_told_so(rank: int, world: int) -> None:
    building: Any = sys.modules["faststep.zero.build"]
    shapes = [(3, 4), (5,), (2, 2)]
    for what, text in DIFFERENCES.items():
        mine, dtypes = list(shapes), [torch.float32]
        if rank == 1 and what == "shape":
            mine[1] = (6,)
        if rank == 1 and what == "dtype":
            dtypes = [torch.float32, torch.bfloat16]
        if rank == 1 and what == "number":
            mine.append((1,))
        model = Given(mine, dtypes)
        if rank == 1 and what == "frozen":
            model.p1.requires_grad_(False)
        params = list(model.parameters())
        if rank == 1 and what == "order":
            params.reverse()
        kept = building._version
        if rank == 1 and what == "version":
            building._version = lambda: "9.9"
        kind = torch.optim.Adam if rank == 1 and what == "optimizer" else torch.optim.AdamW
        said: list[Any] = [None] * world
        dist.all_gather_object(
            said, error_of(lambda m=model, k=kind, p=params: zero.shard(m, k(p)))
        )
        building._version = kept
        assert len(set(said)) == 1
        assert said[0].startswith("RuntimeError: shard(): the ranks differ"), said[0]
        assert text in said[0], said[0]
        assert "rank 1 has" in said[0]


# ---- odd models


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.embedding(x)))


@on_ranks(2)
def test_odd_models(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = _Tied()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sharded = zero.shard(model, optimizer)
    assert sharded.param_groups is optimizer.param_groups
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            x = torch.randint(30, (8,), generator=torch.Generator().manual_seed(step + rank))
            nn.functional.cross_entropy(model(x), x).backward()
            sharded.step()
            scheduler.step()
            sharded.zero_grad()
    assert not [one for one in caught if "lr_scheduler" in str(one.message)]
    assert sharded.param_groups[0]["lr"] == 0.025
    assert model.head.weight is model.embedding.weight
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert moved == ["embedding.weight"]
    assert_alike(model.parameters())
    with torch.no_grad():
        model.never.bias.data = torch.full((2,), 5.0)
        model.head.weight.data = model.head.weight.detach() * 2.0
        doubled = model.head.weight.detach().clone()
    nn.functional.cross_entropy(model(x), x).backward()
    sharded.step()
    assert 0.0 < float((model.head.weight - doubled).abs().max()) < 0.1
    assert model.never.bias.tolist() == [5.0, 5.0]


@on_ranks(2)
def test_a_gradient_dropped_on_one_rank(rank: int, world: int) -> None:
    """A gradient that the first rank alone sets to None, and one that all do."""
    model = Given([(50, 3), (4,)], [torch.float32])
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0)
    model(grads_for(model, rank)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    if rank == 0:
        model.p1.grad = None
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        check_error(call, "the ranks had gradients of different parameters")
    assert differences(before, model.parameters()) == []
    model.p1.grad = None
    optimizer.step()
    assert differences(before, model.parameters()) == [0]


@on_ranks(2)
def test_gradients_of_different_parameters_at_stage_three(rank: int, world: int) -> None:
    """Each rank uses a layer of its own; fully_shard adds their gradients up, as sizes fit."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(world)))
    optimizer = zero.shard(layers, torch.optim.SGD(layers.parameters(), lr=0.1), stage=3, blocks=[])
    before = [p.to_local().clone() for p in layers.parameters()]
    with torch.no_grad():  # the gradients that ranks have after such a backward
        for number, layer in enumerate(layers):
            for param in layer.parameters():
                param.grad = torch.ones_like(param) if number == rank else None
    said = error_of(optimizer.step)
    assert "the ranks differ" in said
    assert "'0.weight' with a gradient" in said
    assert "'0.weight' without a gradient" in said
    assert "nothing was updated" in said
    assert differences(before, (p.to_local() for p in layers.parameters())) == []
    for layer in layers:
        for param in layer.parameters():
            param.grad = torch.ones_like(param)
    optimizer.step()
    (first,) = optimizer.param_groups
    if rank == 0:
        more = {**first, "params": [first["params"].pop()]}
        optimizer.param_groups = [first, more]
    text = "rank 0 has '1.bias' with a gradient, in group 1; rank 1 has "
    check_error(optimizer.step, text)
    empty = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(0))])
    given = torch.optim.SGD(empty.parameters(), lr=0.1)
    text = "parameter '1' has no elements"
    check_error(lambda: zero.shard(empty, given, stage=3, blocks=[]), text)
