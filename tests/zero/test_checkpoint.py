"""State dicts of sharded optimizers, saved and loaded at other numbers of ranks."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

import faststep
from faststep import zero
from ranks import on_ranks

from .common import (
    OTHERS,
    SHAPES,
    Given,
    differences,
    grads_for,
    mean_of,
    optimizer_of,
    states_differ,
)

LOW = [torch.float32, torch.bfloat16, torch.float64]
NAMES = ("AdamW", "Adam", "momentum", "Lion", *OTHERS)


def _without_one(model: Given, *seed: int) -> list[Any]:
    return [None if n == 1 else grad for n, grad in enumerate(grads_for(model, *seed))]


def _steps(
    sharded: Any, model: Given, reference: Any, whole: Given, world: int, first: int
) -> None:
    """Two steps of both, in which all ranks have the same gradients."""
    for step in (first, first + 1):
        for one, opt in ((model, sharded), (whole, reference)):
            grads = _without_one(one, step)
            if opt is sharded:
                one(grads).backward()
            else:
                for param, grad in zip(one.parameters(), grads, strict=True):
                    mean = None if grad is None else mean_of([grad] * world)
                    param.grad = None if mean is None else torch.empty_like(param).copy_(mean)
            opt.step()
            opt.zero_grad()


def _unlike(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two state dicts differ, in layout too."""
    if isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other):
            return [f"{where}: {list(one)}, not {list(other)}"]
        return [text for key in one for text in _unlike(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, torch.Tensor):
        same = torch.equal(one, other) and one.dtype == other.dtype
        return [] if same and one.stride() == other.stride() else [where]
    if isinstance(one, list):
        return [text for a, b in zip(one, other, strict=True) for text in _unlike(a, b, where)]
    return [] if one == other else [f"{where}: {one}, not {other}"]


@on_ranks(3, name=NAMES)
def test_saved_on_three_loaded_on_any(rank: int, world: int, name: str) -> None:
    groups = {2: dist.new_group([0, 1]), 1: dist.new_group([0]), 3: None}
    wrong: list[str] = []
    model, whole = Given(SHAPES, LOW), Given(SHAPES, LOW)
    reference = optimizer_of(name, whole.parameters())
    sharded = zero.shard(model, optimizer_of(name, model.parameters()), bucket_mb=0.1)
    if name != "Adagrad":  # torch makes its states in the constructor
        assert sharded.state_dict()["state"] == {}
    _steps(sharded, model, reference, whole, world, 0)
    wrong += [f"p{n}" for n in differences(model.parameters(), whole.parameters())]
    saved = sharded.state_dict()
    with pytest.raises(RuntimeError, match=r"^load_state_dict\(\): the ranks differ, first"):
        sharded.load_state_dict(saved)
    if rank:
        assert saved["state"] == {}
    else:
        wrong += _unlike(saved, reference.state_dict())
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    sent = [saved]
    dist.broadcast_object_list(sent, 0)
    (saved,) = sent
    for ranks, group in groups.items():
        if rank >= ranks:
            continue
        new, other = Given(SHAPES, LOW), Given(SHAPES, LOW)
        new.load_state_dict(whole.state_dict())
        other.load_state_dict(whole.state_dict())
        ours = zero.shard(
            new, optimizer_of(name, new.parameters()), process_group=group, bucket_mb=0.3
        )
        wrong += [f"start {ranks} {n}" for n in differences(new.parameters(), other.parameters())]
        kept, kept_group = ours.param_groups, ours.param_groups[0]
        ours.load_state_dict(copy.deepcopy(saved))  # with one rank it keeps the tensors
        if ours.param_groups is not kept or ours.param_groups[0] is not kept_group:
            wrong.append(f"{ranks}: other groups")
        theirs = optimizer_of(name, other.parameters())
        theirs.load_state_dict(copy.deepcopy(saved))
        _steps(ours, new, theirs, other, ranks, 5)
        wrong += [f"{ranks}: p{n}" for n in differences(new.parameters(), other.parameters())]
        wrong += states_differ(ours, theirs)
    assert not wrong, wrong


@on_ranks(2)
def test_states_are_taken_over(rank: int, world: int) -> None:
    """An optimizer that has made steps, with a frozen parameter that has a state."""
    models = [Given(SHAPES, LOW) for _ in range(2)]
    optimizers: list[Any] = [faststep.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(grads_for(model, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.p0.requires_grad_(False)
    torch_one = torch.optim.AdamW(models[0].parameters(), lr=0.01)
    torch_one.load_state_dict(optimizers[0].state_dict())
    sharded = zero.shard(models[0], torch_one)
    assert not torch_one.state
    grads = [None if n == 0 else g for n, g in enumerate(grads_for(models[0], 2))]
    models[0](grads).backward()
    for param, grad in zip(models[1].parameters(), grads, strict=True):
        param.grad = (
            None if grad is None else torch.empty_like(param).copy_(mean_of([grad] * world))
        )
    sharded.step()
    optimizers[1].step()
    assert differences(models[0].parameters(), models[1].parameters()) == []
    saved = sharded.state_dict()
    assert rank or not _unlike(saved, optimizers[1].state_dict())
