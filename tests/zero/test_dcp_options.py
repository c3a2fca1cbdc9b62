"""Sharded optimizers and torch.distributed.checkpoint: whole states, other stages, and errors."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import faststep
from faststep import zero
from ranks import on_ranks

from .checkpoints import (
    LOW,
    both_step,
    load,
    made,
    remove,
    save,
    shared_folder,
)
from .common import SHAPES, Given, optimizer_of, states_differ

WHOLE = ("AdamW", "ASGD", "NAdam", "Adagrad")


@on_ranks(2, name=WHOLE)
def test_full_state_dicts(rank: int, world: int, name: str) -> None:
    """StateDictOptions(full_state_dict=True), with and without rank 0 as the only one."""
    wrong = []
    whole = Given(SHAPES, LOW)
    plain = optimizer_of(name, whole.parameters())
    model, sharded = made(name, None)
    both_step(sharded, model, plain, whole, 1)
    expected = get_optimizer_state_dict(whole, plain)
    plain.load_state_dict(plain.state_dict())  # torch casts the numbers of bf16 parameters
    sharded.consolidate_state_dict(to=1)
    if bool(sharded.state_dict()["state"]) != (rank == 1):
        wrong.append("what was gathered is on another rank")
    for first_only in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=first_only)
        found = get_optimizer_state_dict(model, sharded, options=options)
        if first_only and rank:
            wrong += [f"{found} on rank {rank}"] if found else []
        else:
            wrong += _unlike(found, expected)
        options.broadcast_from_rank0 = first_only
        new, ours = made(name, None, 0.3)
        set_optimizer_state_dict(new, ours, found, options=options)
        wrong += [
            f"{first_only}: {text}"
            for text in states_differ(ours, plain)
            # torch broadcasts the memory of a channels_last tensor into a contiguous one
            if not (first_only and text.startswith("p5"))
        ]
    assert not wrong, wrong


def _unlike(found: Any, expected: Any) -> list[str]:
    if found["param_groups"] != expected["param_groups"]:
        return ["groups"]
    return [
        f"{name} {key}"
        for name, entries in expected["state"].items()
        for key, value in entries.items()
        if not torch.equal(found["state"][name][key], value)
    ]


def _error(work: Callable[[], object]) -> str:
    try:
        work()
    except BaseException as error:  # as torch's CheckpointException is
        return f"{type(error).__name__}: {error}"
    return "no error"


@on_ranks(2)
def test_what_slices_cannot_do(rank: int, world: int) -> None:
    path = shared_folder()
    model, sharded = made("AdamW", None)
    both_step(sharded, model, optimizer_of("AdamW", model.parameters()), model, 1)
    states = get_optimizer_state_dict(model, sharded)
    first = states["state"]["p0"]["exp_avg"]
    assert "'p0'" in repr(first)
    writer = dcp.FileSystemWriter(path / "other")
    for use in (
        first.sum,
        lambda: torch.empty(300, 70).copy_(first),
        lambda: dcp.async_save(states, storage_writer=writer),
    ):
        assert "this rank has a slice of it" in _error(use)
    new, ours = made("AdamW", None, 1e-3)
    before = {key: dict(value) for key, value in ours.state.items()}
    text = _error(lambda: set_optimizer_state_dict(new, ours, states))
    assert text.startswith("RuntimeError: load_state_dict(): "), text
    assert "other slices" in text
    whole = sharded.state_dict()
    sent = [whole]
    dist.broadcast_object_list(sent, 0)
    sent[0]["state"][0]["exp_avg"] = torch.zeros(3, 3)
    text = _error(lambda: ours.load_state_dict(sent[0]))
    assert "'p0'" in text, text
    assert "(3, 3)" in text
    assert before == {key: dict(value) for key, value in ours.state.items()}
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)["state"]["p0"]["exp_avg"]
    assert (again.part is None) is (first.part is None)
    assert first.part is None or torch.equal(again.part[1], first.part[1])
    remove(path)


class _FailingWriter(dcp.FileSystemWriter):
    """Ends in the middle of a save, after this rank has written its file."""

    def write_data(self, *args: Any) -> Any:
        super().write_data(*args).wait()
        raise OSError("planted")


@on_ranks(2)
def test_a_save_that_fails_leaves_the_last_checkpoint(rank: int, world: int) -> None:
    """What docs/sharding.md does: save beside the last checkpoint, then rename."""
    path = shared_folder()
    whole = Given(SHAPES, LOW)
    plain = optimizer_of("AdamW", whole.parameters())
    model, sharded = made("AdamW", None)
    both_step(sharded, model, plain, whole, 1)
    save(model, sharded, path / "first.tmp")
    if rank == 0:
        (path / "first.tmp").rename(path / "first")
    dist.barrier()
    other = copy.deepcopy(whole)
    both_step(sharded, model, optimizer_of("AdamW", other.parameters()), other, 2)
    states = {"optimizer": get_optimizer_state_dict(model, sharded)}
    kind = _FailingWriter if rank == 1 else dcp.FileSystemWriter
    saved = _error(lambda: dcp.save(states, storage_writer=kind(path / "second.tmp")))
    wrong = [] if "planted" in saved else [saved]
    new, ours = made("AdamW", None, 0.3)
    half = _error(lambda: load(new, ours, path / "second.tmp"))
    wrong += [] if ".metadata" in half else [half]
    load(new, ours, path / "first")
    wrong += states_differ(ours, plain)
    remove(path)
    assert not wrong, wrong


@on_ranks(2)
def test_the_optimizer_as_a_stateful_and_other_stages(rank: int, world: int) -> None:
    """The optimizer itself in what is saved, and stage 3, whose files stage 2 loads."""
    path = shared_folder()
    wrong = []
    whole = Given(SHAPES, LOW)
    plain = optimizer_of("AdamW", whole.parameters())
    model, sharded = made("AdamW", None)
    both_step(sharded, model, plain, whole, 1)
    dcp.save({"optimizer": sharded}, checkpoint_id=path / "itself")
    _, ours = made("AdamW", None, 0.3)
    dcp.load({"optimizer": ours}, checkpoint_id=path / "itself")
    wrong += states_differ(ours, plain)
    nets = [nn.Sequential(nn.Linear(33, 7), nn.Linear(7, 300)) for _ in range(2)]
    pair = [faststep.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    third, second = (
        zero.shard(net, one, stage=stage)
        for net, one, stage in zip(nets, pair, (3, 2), strict=True)
    )
    nets[0](torch.ones(2, 33)).square().mean().backward()
    third.step()
    save(nets[0], third, path / "stage 3")
    load(nets[1], second, path / "stage 3")
    save(nets[1], second, path / "stage 2")
    back = get_optimizer_state_dict(nets[0], third)
    kept = {name: entry["exp_avg"].full_tensor() for name, entry in back["state"].items()}
    for entry in back["state"].values():
        entry["exp_avg"].zero_()
    dcp.load({"optimizer": back}, checkpoint_id=path / "stage 2")
    for name, entry in back["state"].items():
        if not torch.equal(entry["exp_avg"].full_tensor(), kept[name]):
            wrong.append(name)
    remove(path)
    assert not wrong, wrong
