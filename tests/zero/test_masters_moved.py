"""Masters that move between one process and shards in mid-training."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

import faststep
from faststep import zero
from faststep.optim.masters import MASTER
from ranks import on_ranks

from .checkpoints import load, remove, save, shared_folder
from .common import OTHERS, SHAPES, Given, differences, grads_for, optimizer_of
from .rounded import DTYPES, step_whole, unlike, wide_of

NAMES = ("AdamW", "SGD", "momentum", "Lion", *OTHERS)


def _alone(name: str, model: nn.Module, masters: bool = True) -> Any:
    """An optimizer of one process, with the options of that name."""
    plain: Any = optimizer_of(name, model.parameters())
    group = {key: value for key, value in plain.param_groups[0].items() if key != "params"}
    kind: Any = type(plain)
    made = kind(model.parameters(), lr=0.1, master_weights=masters)
    made.param_groups[0].update(group)
    made.defaults = plain.defaults
    if name == "Adagrad":  # whose states were made by the constructor, with the default of it
        made.state.clear()
    return made


def _both_step(one: Any, model: Given, whole: Any, reference: Any, world: int, seed: int) -> None:
    """A step in which all ranks have the same gradients."""
    if isinstance(one, zero.ShardedOptimizer):
        model(grads_for(model, seed)).backward()
        one.step()
        one.zero_grad()
    else:
        step_whole(model, one, [grads_for(model, seed)] * world)
    step_whole(whole, reference, [grads_for(model, seed)] * world)


def _as_shard(optimizer: Any) -> Any:
    """What `unlike` compares."""
    optimizer._engine = None
    return optimizer


@on_ranks(3, name=NAMES)
def test_masters_move(rank: int, world: int, name: str) -> None:
    warnings.simplefilter("ignore")
    model = Given(SHAPES, DTYPES)
    whole = wide_of(model)
    reference = optimizer_of(name, whole.parameters())
    optimizer = _alone(name, model)
    for seed in (1, 2):
        _both_step(optimizer, model, whole, reference, world, seed)
    wrong = [f"alone: {text}" for text in unlike(_as_shard(optimizer), model, whole, reference)]
    path = shared_folder()
    if rank == 0:
        save(model, optimizer, path / "one", no_dist=True)
    dist.barrier()
    began = copy.deepcopy((model, whole, reference))
    sharded = zero.shard(model, optimizer, bucket_mb=0.1)  # takes the masters over
    for seed in (3, 4):
        _both_step(sharded, model, whole, reference, world, seed)
    wrong += [f"sharded: {text}" for text in unlike(sharded, model, whole, reference)]
    sent = [sharded.state_dict()]
    dist.broadcast_object_list(sent, 0)
    save(model, sharded, path / "ranks")

    new, new_whole, theirs = copy.deepcopy(began)  # torch's checkpoint of one process
    other = zero.shard(new, optimizer_of(name, new.parameters()), master_weights=True)
    load(new, other, path / "one")
    theirs.load_state_dict(theirs.state_dict())  # torch casts the numbers of parameters
    for seed in (3, 4):
        _both_step(other, new, new_whole, theirs, world, seed)
    wrong += [f"from one: {text}" for text in unlike(other, new, new_whole, theirs)]

    reference.load_state_dict(reference.state_dict())
    for how in ("dict", "torch"):
        new, new_whole, theirs = Given(SHAPES, DTYPES), *copy.deepcopy((whole, reference))
        back = _alone(name, new)
        if how == "dict":
            back.load_state_dict(copy.deepcopy(sent[0]))
        elif rank == 0:
            load(new, back, path / "ranks", no_dist=True)
        else:
            continue
        new.load_state_dict(model.state_dict())
        for seed in (5, 6):
            _both_step(back, new, new_whole, theirs, world, seed)
        found = unlike(_as_shard(back), new, new_whole, theirs)
        wrong += [f"back by {how}: {text}" for text in found]
    remove(path)
    assert not wrong, wrong


@on_ranks(2, name=("AdamW", "momentum", "Adadelta"))
def test_masters_begin_when_sharded(rank: int, world: int, name: str) -> None:
    """An optimizer without masters, whose states are fp32 from shard() on."""
    model = Given(SHAPES, DTYPES)
    optimizer = optimizer_of(name, model.parameters())
    step_whole(model, optimizer, [grads_for(model, 1)] * world)
    whole = wide_of(model)
    reference = optimizer_of(name, whole.parameters())
    reference.load_state_dict(optimizer.state_dict())
    sharded = zero.shard(model, optimizer, bucket_mb=0.1, master_weights="fp32")
    for seed in (3, 4):
        _both_step(sharded, model, whole, reference, world, seed)
    found = unlike(sharded, model, whole, reference)
    assert not found, found


@on_ranks(2)
def test_what_counts(rank: int, world: int) -> None:
    """What `master_weights` of the optimizer and of shard() say together."""
    for own in (True, False):
        for asked in (None, True, False, "fp32"):
            model = Given(SHAPES, DTYPES)
            optimizer = faststep.optim.AdamW(model.parameters(), lr=0.01, master_weights=own)
            step_whole(model, optimizer, [grads_for(model, 1)])
            sharded = zero.shard(model, optimizer, master_weights=asked)  # type: ignore[arg-type]
            model(grads_for(model, 2)).backward()
            sharded.step()
            kept = {MASTER in s for p, s in sharded.state.items() if p.dtype == torch.bfloat16}
            assert kept == {own if asked is None else bool(asked)}, (own, asked)


@on_ranks(2)
def test_stage_3(rank: int, world: int) -> None:
    """DTensors in bf16: from one process with masters, and from one without, whose states widen."""
    for name in ("AdamW", "momentum", "NAdam", "Adagrad"):
        for own in (True, False):
            model = Given([(30, 7), (33,), (5, 4, 3, 3)], [torch.bfloat16])
            for param in model.parameters():
                param.data = param.data.contiguous()
            optimizer = optimizer_of(name, model.parameters())
            if own:
                optimizer = _alone(name, model)
            step_whole(model, optimizer, [grads_for(model, 1)] * world)
            wide = copy.deepcopy(model).float()
            reference = optimizer_of(name, wide.parameters())
            reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for param, copied in zip(model.parameters(), wide.parameters(), strict=True):
                copied.data = optimizer.state[param].get(MASTER, copied.detach()).clone()
                reference.state[copied].pop(MASTER, None)
            sharded = zero.shard(model, optimizer, stage=3, master_weights=None if own else True)
            for seed in (2, 3):
                grads = grads_for(wide, seed)
                for param, copied, grad in zip(
                    model.parameters(), wide.parameters(), grads, strict=True
                ):
                    values: Any = param
                    copied.grad = grad.bfloat16().float()
                    param.grad = distribute_tensor(
                        grad.bfloat16(), values.device_mesh, values.placements
                    )
                sharded.step()
                reference.step()
            masters = [sharded.state[param][MASTER].full_tensor() for param in model.parameters()]
            assert differences(masters, wide.parameters()) == [], (name, own)


def test_other_values_are_refused() -> None:
    model = nn.Linear(3, 4).bfloat16()
    optimizer = faststep.optim.AdamW(model.parameters(), master_weights=True)
    for value in ("bf16", 1.5, "True"):
        with pytest.raises(ValueError, match='master_weights must be True, False, "fp32" or'):
            zero.shard(model, optimizer, master_weights=value)  # type: ignore[arg-type]
