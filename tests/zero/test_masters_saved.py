"""Checkpoints of runs with master_weights=True, and of runs without, loaded by each other."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import faststep
from faststep import zero
from faststep.optim.masters import MASTER
from ranks import on_ranks

from .checkpoints import load, remove, save, shared_folder
from .common import OTHERS, SHAPES, Given, grads_for, optimizer_of
from .rounded import DTYPES, step_whole, unlike, wide_of

NAMES = ("AdamW", "SGD", *OTHERS)


def _made(name: str, group: Any = None, masters: bool = True, **how: Any) -> tuple[Given, Any]:
    model = Given(SHAPES, DTYPES)
    optimizer = optimizer_of(name, model.parameters())
    return model, zero.shard(
        model, optimizer, process_group=group, master_weights=masters, bucket_mb=0.1, **how
    )


def _steps(sharded: Any, model: Given, whole: Any, reference: Any, seeds: Sequence[int]) -> None:
    """Steps in which all ranks have the same gradients."""
    world = 1 if sharded._engine is None else sharded._engine.group.world
    for seed in seeds:
        model(grads_for(model, seed)).backward()
        sharded.step()
        sharded.zero_grad()
        step_whole(whole, reference, [grads_for(model, seed)] * world)


def _as_unsharded(rank: int, saved: dict[str, Any], reference: Any) -> list[str]:
    """What differs between a state dict and fp32 states, with fp32 parameters as masters."""
    if rank:
        return [] if not saved["state"] else ["states on another rank"]
    wrong = []
    for number, (param, state) in enumerate(reference.state.items()):
        expected = {**state, MASTER: param} if param.dtype == torch.float32 else dict(state)
        if number % len(DTYPES) == 1:
            del expected[MASTER]
        mine = saved["state"][number]
        if list(mine) != list(expected):
            wrong.append(f"{number} {list(mine)}")
        for key in expected.keys() & mine.keys():
            same = torch.equal(mine[key], expected[key]) and mine[key].dtype == expected[key].dtype
            if not same or mine[key].stride() != expected[key].stride():
                wrong.append(f"{number} {key}")
    return wrong


@on_ranks(3, name=NAMES)
def test_saved_on_three_loaded_on_any(rank: int, world: int, name: str) -> None:
    """state_dict() of three ranks on one, two and three, by itself and by torch's checkpoints."""
    warnings.simplefilter("ignore")
    groups: dict[int, Any] = {1: dist.new_group([0]), 2: dist.new_group([0, 1]), 3: None}
    path = shared_folder()
    model, sharded = _made(name)
    whole = wide_of(model)
    reference = optimizer_of(name, whole.parameters())
    _steps(sharded, model, whole, reference, (1, 2))
    sent = [sharded.state_dict()]
    wrong = _as_unsharded(rank, sent[0], reference)
    dist.broadcast_object_list(sent, 0)
    save(model, sharded, path / "whole")
    for how in ("dict", "torch"):
        for count, group in groups.items():
            if rank >= count:
                continue
            new, other = _made(name, group)
            if how == "dict":
                other.load_state_dict(copy.deepcopy(sent[0]))
            new.load_state_dict(model.state_dict())  # in any order
            if how == "torch":
                load(new, other, path / "whole", process_group=group)
            wide, theirs = copy.deepcopy((whole, reference))
            theirs.load_state_dict(theirs.state_dict())  # torch casts the numbers of float64
            found = unlike(other, new, wide, theirs)
            _steps(other, new, wide, theirs, (3,))
            found += unlike(other, new, wide, theirs)
            wrong += [f"{how} on {count}: {text}" for text in found]
    remove(path)
    assert not wrong, wrong


@on_ranks(2)
def test_loading_between_runs_with_and_without(rank: int, world: int) -> None:
    """States of runs that kept no masters, and masters in runs that keep none."""
    warnings.simplefilter("ignore")
    path = shared_folder()
    low = Given(SHAPES, DTYPES)  # an unsharded run, whose states are as its parameters
    plain = faststep.optim.AdamW(low.parameters(), lr=0.01)
    for param, grad in zip(low.parameters(), grads_for(low, 1), strict=True):
        param.grad = torch.empty_like(param).copy_(grad)
    plain.step()
    if rank == 0:
        save(low, plain, path / "plain", no_dist=True)
    dist.barrier()

    def expected() -> tuple[Given, Any]:
        whole = wide_of(low)
        reference = faststep.optim.AdamW(whole.parameters(), lr=0.01)
        reference.load_state_dict(copy.deepcopy(plain.state_dict()))  # widens states
        return whole, reference

    for how in ("dict", "torch", "taken over"):
        model = copy.deepcopy(low)
        ours = torch.optim.AdamW(model.parameters(), lr=0.01)
        if how == "taken over":
            ours.load_state_dict(plain.state_dict())
        sharded = zero.shard(model, ours, master_weights=True, bucket_mb=0.1)
        if how == "dict":
            sharded.load_state_dict(plain.state_dict())
        elif how == "torch":
            planner = DefaultLoadPlanner(allow_partial_load=True)
            load(model, sharded, path / "plain", planner=planner)
        whole, reference = expected()
        _steps(sharded, model, whole, reference, (2, 3))
        assert not unlike(sharded, model, whole, reference), how
    sent = [sharded.state_dict()]
    dist.broadcast_object_list(sent, 0)
    for count, group in {1: dist.new_group([0]), 2: None}.items():
        if rank < count:
            _, other = _made("AdamW", group, masters=False)
            other.load_state_dict(copy.deepcopy(sent[0]))
            assert not any(MASTER in state for state in other.state.values())
            assert torch.bfloat16 in {state["exp_avg"].dtype for state in other.state.values()}
    remove(path)
