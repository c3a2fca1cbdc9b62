"""Sharded optimizers and torch.distributed.checkpoint: saved on N ranks, loaded on M."""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ranks import on_ranks

from .checkpoints import (
    LOW,
    both_step,
    load,
    made,
    plain_run,
    remove,
    save,
    shared_folder,
)
from .common import SHAPES, Given, differences, grads_for, optimizer_of, states_differ

NAMES = ("AdamW", "momentum", "SGD", "Adagrad", "ASGD", "NAdam", "Rprop")
UNUSED = ("AdamW", "RMSprop", "Adagrad")


@on_ranks(3, name=NAMES)
def test_saved_on_any_loaded_on_any(rank: int, world: int, name: str) -> None:
    """Every number of ranks loads what every other has saved, and so do unsharded runs."""
    warnings.simplefilter("ignore")
    groups: dict[int, Any] = {1: dist.new_group([0]), 2: dist.new_group([0, 1]), 3: None}
    path = shared_folder()
    wrong: list[str] = []
    expected = {str(ranks): plain_run(name, ranks) for ranks in groups}
    expected["flat"] = expected["plain"] = expected["3"]
    for ranks, group in groups.items():
        if rank < ranks:
            model, sharded = made(name, group)
            for seed in (1, 2):
                model(grads_for(model, seed)).backward()
                sharded.step()
                sharded.zero_grad()
            save(model, sharded, path / str(ranks), process_group=group)
            if ranks == 3:
                save(model, sharded, path / "flat", flat=True)
    if rank == 0:
        save(*expected["plain"], path / "plain", no_dist=True)
    dist.barrier()
    for saved, (whole, plain) in expected.items():
        plain.load_state_dict(plain.state_dict())  # torch casts the numbers of bf16 parameters
        for ranks, group in groups.items():
            if rank < ranks:
                found = _loaded_on(group, name, path / saved, whole, plain)
                wrong += [f"{saved} on {ranks}: {text}" for text in found]
        if rank == 0:
            other = copy.deepcopy(whole)
            new = optimizer_of(name, other.parameters())
            load(other, new, path / saved, saved == "flat", no_dist=True)
            for a, b in zip(whole.parameters(), other.parameters(), strict=True):
                for key, value in plain.state[a].items():
                    if not torch.equal(value, new.state[b][key]):
                        wrong.append(f"{saved} in an unsharded run: {key}")
    remove(path)
    assert not wrong, wrong


def _loaded_on(group: Any, name: str, path: Path, whole: Given, plain: Any) -> list[str]:
    """What differs after loading, and after one more step."""
    model, sharded = made(name, group, 0.3)
    sharded.param_groups[0]["lr"] = 0.5
    load(model, sharded, path, path.name == "flat", process_group=group)
    wrong = states_differ(sharded, plain)
    model.load_state_dict(whole.state_dict())
    other = copy.deepcopy(whole)
    reference = optimizer_of(name, other.parameters())
    reference.load_state_dict(copy.deepcopy(plain.state_dict()))
    both_step(sharded, model, reference, other, 3)
    moved = differences(model.parameters(), other.parameters())
    return wrong + [f"p{n} after a step" for n in moved]


@on_ranks(3)
def test_nothing_is_gathered(rank: int, world: int) -> None:
    """What save and load take: no whole state, and no memory beyond the slices."""
    path = shared_folder()
    model, sharded = made("AdamW", None)
    whole = Given(SHAPES, LOW)
    plain = optimizer_of("AdamW", whole.parameters())
    both_step(sharded, model, plain, whole, 1)
    states = get_optimizer_state_dict(model, sharded)["state"]
    live = {t.untyped_storage().data_ptr() for s in sharded.state.values() for t in s.values()}
    shards = [
        entries[key].part[1]
        for entries in states.values()
        for key in ("exp_avg", "exp_avg_sq")
        if entries[key].part is not None
    ]
    save(model, sharded, path / "kept")
    written = sum(file.stat().st_size for file in (path / "kept").glob(f"__{rank}_*"))
    remove(path)
    assert sorted(states) == sorted(name for name, _ in model.named_parameters())
    assert all(t.untyped_storage().data_ptr() in live for t in shards if t.numel())
    everything = 2 * sum(p.nbytes for p in model.parameters())
    assert sum(t.nbytes for t in shards) < 0.6 * everything  # of a few chunks, on 3 ranks
    assert written < 0.7 * everything


@on_ranks(3)
def test_a_state_dict_before_the_first_step(rank: int, world: int) -> None:
    """An optimizer without states, before and after it was asked for its state dict."""
    model, sharded = made("AdamW", None)
    before = [p.detach().clone() for p in model.parameters()]
    states = get_optimizer_state_dict(model, sharded)
    for entries in states["state"].values():
        assert float(entries["step"]) == 0.0
        assert entries["exp_avg"].part is None or not entries["exp_avg"].part[1].any()
    assert differences(before, model.parameters()) == []
    assert all(p.grad is None for p in model.parameters())
    assert sharded.param_groups[0]["lr"] == 0.01
    assert len(sharded.state) == 0
    whole = Given(SHAPES, LOW)
    plain = optimizer_of("AdamW", whole.parameters())
    both_step(sharded, model, plain, whole, 1)
    assert differences(model.parameters(), whole.parameters()) == []


@on_ranks(2, name=UNUSED)
def test_a_parameter_without_a_state(rank: int, world: int, name: str) -> None:
    """A parameter without a state, and one that is frozen."""
    path = shared_folder()
    wrong = []
    whole = Given(SHAPES, LOW)
    plain = optimizer_of(name, whole.parameters())
    model, sharded = made(name, None)
    both_step(sharded, model, plain, whole, 1, without=0 if name == "RMSprop" else 1)
    save(model, sharded, path / "kept")
    new, ours = made(name, None, 0.3)
    partial = DefaultLoadPlanner(allow_partial_load=True)
    load(new, ours, path / "kept", planner=partial)
    new.load_state_dict(model.state_dict())
    for flat in (False, True):  # into one that is in use
        options = StateDictOptions(flatten_optimizer_state_dict=flat, strict=False)
        states = get_optimizer_state_dict(model, sharded, options=options)
        set_optimizer_state_dict(model, sharded, states, options=options)
    wrong += states_differ(sharded, plain)
    for one, optimizer in ((model, sharded), (new, ours)):
        other = copy.deepcopy(whole)
        reference = optimizer_of(name, other.parameters())
        reference.load_state_dict(copy.deepcopy(plain.state_dict()))
        both_step(optimizer, one, reference, other, 2)
        wrong += [f"p{n}" for n in differences(one.parameters(), other.parameters())]
    remove(path)
    assert not wrong, wrong


@on_ranks(2)
def test_async_save(rank: int, world: int) -> None:
    """Steps go on while a checkpoint is written, which has the states of its time."""
    path = shared_folder()
    wrong = []
    whole = Given(SHAPES, LOW)
    plain = optimizer_of("AdamW", whole.parameters())
    model, sharded = made("AdamW", None)
    both_step(sharded, model, plain, whole, 1)
    then = copy.deepcopy(plain.state_dict())
    states = get_optimizer_state_dict(model, sharded)
    saving = dcp.async_save({"optimizer": states}, checkpoint_id=path / "kept")
    for seed in range(2, 12):
        both_step(sharded, model, plain, whole, seed)
    saving.result()
    wrong += [f"p{n}" for n in differences(model.parameters(), whole.parameters())]
    dist.barrier()
    new, ours = made("AdamW", None, 0.3)
    load(new, ours, path / "kept")
    reference = optimizer_of("AdamW", whole.parameters())
    reference.load_state_dict(then)
    wrong += states_differ(ours, reference)
    remove(path)
    assert not wrong, wrong
