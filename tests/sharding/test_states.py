"""States of sharded parameters: torch's checkpoints, from torch's optimizers to ours and back."""

import io
import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import faststep.optim
from ranks import on_ranks

from .common import Twins, backward, check_close, fully_sharded, local, net

CLASSES = (("AdamW", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9}))


def trained(module: Any, name: str, rank: int, first: int, steps: int = 2) -> tuple[Any, Any]:
    model = fully_sharded()
    options = dict(CLASSES)[name]
    optimizer = getattr(module, name)(model.parameters(), **options)
    train(model, optimizer, rank, first, steps)
    return model, optimizer


def copied(states: Any) -> Any:
    """As if they had been saved: an optimizer goes on with the very tensors that it is given.

    Not by deepcopy, which torch does not do to DTensors."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(model: nn.Module, optimizer: Any, rank: int, first: int, steps: int = 2) -> None:
    for step in range(first, first + steps):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def check_alike(model: nn.Module, optimizer: Any, other_model: nn.Module, other: Any) -> None:
    for mine, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        check_close(mine, theirs)
        for key, value in optimizer.state[mine].items():
            check_close(value, other.state[theirs][key])


PAIRS = ((faststep.optim, torch.optim), (torch.optim, faststep.optim))


@on_ranks(2)
def test_optimizer_state_dicts(rank: int, world: int) -> None:
    """By torch.distributed.checkpoint.state_dict, sharded, whole and in the middle of training."""
    for name, options in CLASSES:
        for kind in (
            StateDictOptions(),
            StateDictOptions(full_state_dict=True),
            StateDictOptions(flatten_optimizer_state_dict=True),
        ):
            for before, after in PAIRS:
                model, optimizer = trained(before, name, rank, 0)
                states = get_optimizer_state_dict(model, optimizer, options=kind)
                states = copied(states)
                new_model, _ = trained(before, name, rank, 0)  # with the same parameters
                new = getattr(after, name)(new_model.parameters(), **{**options, "lr": 0.5})
                set_optimizer_state_dict(new_model, new, states, options=kind)
                assert new.param_groups[0]["lr"] == options["lr"]
                check_alike(model, optimizer, new_model, new)
                for value in new.state[next(iter(new_model.parameters()))].values():
                    assert isinstance(value, DTensor) == (value.dim() > 0)
                train(model, optimizer, rank, 5)
                train(new_model, new, rank, 5)
                check_alike(model, optimizer, new_model, new)


@on_ranks(2)
def test_of_one_process(rank: int, world: int) -> None:
    """A checkpoint of a run without ranks goes on here, and the other way round."""
    plain = net()
    optimizer = faststep.optim.AdamW(plain.parameters(), lr=0.1)
    train(plain, optimizer, 0, 0)
    whole_options = StateDictOptions(full_state_dict=True)
    states = copied(get_state_dict(plain, optimizer, options=whole_options))
    model = fully_sharded(seed=9)
    new = faststep.optim.AdamW(model.parameters(), lr=0.5)
    set_state_dict(
        model, new, model_state_dict=states[0], optim_state_dict=states[1], options=whole_options
    )
    train(plain, optimizer, 0, 3)
    train(model, new, 0, 3)  # each rank has the same input
    check_alike(plain, optimizer, model, new)
    back = copied(get_optimizer_state_dict(model, new, options=whole_options))
    set_optimizer_state_dict(plain, optimizer, back, options=whole_options)
    check_alike(plain, optimizer, model, new)


@on_ranks(2)
def test_remainders(rank: int, world: int) -> None:
    """Of bf16 shards: the bits of plain parameters, and state dicts with their fp32 masters."""
    models = [net().bfloat16(), net().bfloat16()]
    for model in models:
        fully_shard(model)
    options: dict[str, Any] = {"lr": 0.1, "master_weights": "remainder16"}
    optimizers = [faststep.optim.AdamW(model.parameters(), **options) for model in models]
    twins = Twins(models[0].parameters(), faststep.optim.AdamW, **options)
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            model(x.bfloat16()).float().square().mean().backward()
            if model is models[0]:
                twins.step()
            if step != 2 or model is models[0]:
                optimizer.step()
            optimizer.zero_grad()
        if step == 2:  # the second has left this step out
            states = copied(get_optimizer_state_dict(models[0], optimizers[0]))
            masters = [state["master_weights"] for state in states["state"].values()]
            assert all(master.dtype == torch.float32 for master in masters)
            models[1].load_state_dict(copied(models[0].state_dict()))
            set_optimizer_state_dict(models[1], optimizers[1], states)
        twins.check(optimizers[0])
    twins.params = list(models[1].parameters())
    twins.check(optimizers[1])


@on_ranks(2)
def test_what_counts_elements_refuses_columns(rank: int, world: int) -> None:
    """States in codes and noise: tensor parallelism's parts are no ranges of elements."""
    mesh = init_device_mesh("cpu", (world,))
    for options in ({"state_dtype": "int8"}, {"state_dtype": "bf16", "rounding": "stochastic"}):
        param = nn.Parameter(distribute_tensor(torch.ones(70, 70), mesh, [Shard(1)]))
        optimizer = faststep.optim.AdamW([param], betas=(0.9, 0.99), **options)
        param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError, match=r"has the placements .* along dimension 0"):
            optimizer.step()
        assert not optimizer.state
        assert bool((param.to_local() == 1).all())


@on_ranks(2)
def test_saved_to_files(rank: int, world: int) -> None:
    """By torch.distributed.checkpoint's save and load."""
    paths: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(paths)
    path = paths[0]
    for before, after in PAIRS:
        model, optimizer = trained(before, "AdamW", rank, 0)
        model_states, states = get_state_dict(model, optimizer)
        name = f"{path}/{before.__name__}"
        dcp.save({"model": model_states, "optimizer": states}, checkpoint_id=name)
        new_model = fully_sharded(seed=8)
        new = after.AdamW(new_model.parameters(), lr=0.5)
        model_states, states = get_state_dict(new_model, new)
        found = {"model": model_states, "optimizer": states}
        dcp.load(found, checkpoint_id=name)
        set_state_dict(
            new_model,
            new,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )
        check_alike(model, optimizer, new_model, new)
        train(model, optimizer, rank, 5)
        train(new_model, new, rank, 5)
        check_alike(model, optimizer, new_model, new)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path)


@on_ranks(2)
def test_own_state_dicts(rank: int, world: int) -> None:
    """state_dict and load_state_dict of the optimizers, and torch.save."""
    for before, after in PAIRS:
        model, optimizer = trained(before, "AdamW", rank, 0)
        new_model, _ = trained(before, "AdamW", rank, 0)
        new = after.AdamW(new_model.parameters(), lr=0.5)
        new.load_state_dict(copied(optimizer.state_dict()))
        train(model, optimizer, rank, 5)
        train(new_model, new, rank, 5)
        check_alike(model, optimizer, new_model, new)
    model, optimizer = trained(faststep.optim, "AdamW", rank, 0)
    loaded = copied(optimizer.state_dict())
    new = faststep.optim.AdamW(model.parameters())
    new.load_state_dict(loaded)
    for param in model.parameters():
        for key, value in optimizer.state[param].items():
            assert torch.equal(local(value), local(new.state[param][key]))
