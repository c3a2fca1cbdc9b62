"""Sharded optimizers beside plain ones, saved and loaded by torch.distributed.checkpoint."""

import shutil
import tempfile
from pathlib import Path
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

from faststep import zero

from .common import SHAPES, Given, grads_for, mean_of, optimizer_of

LOW = [torch.float32, torch.bfloat16, torch.float64]


def shared_folder() -> Path:
    path: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    return Path(path[0])


def remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)


def step_plain(plain: Any, whole: nn.Module, world: int, seed: int, without: int = -1) -> None:
    """A step of one process with the mean gradients of so many ranks."""
    for number, (param, grad) in enumerate(
        zip(whole.parameters(), grads_for(whole, seed), strict=True)
    ):
        mean = None if number == without else mean_of([grad] * world)
        param.grad = None if mean is None else torch.empty_like(param).copy_(mean)
    plain.step()
    plain.zero_grad()


def both_step(
    sharded: Any, model: nn.Module, plain: Any, whole: nn.Module, seed: int, without: int = -1
) -> None:
    """A step of both, in which all ranks have the same gradients."""
    world = 1 if sharded._engine is None else sharded._engine.group.world
    grads = [None if n == without else g for n, g in enumerate(grads_for(model, seed))]
    model(grads).backward()
    sharded.step()
    sharded.zero_grad()
    step_plain(plain, whole, world, seed, without)


def plain_run(name: str, world: int) -> tuple[Given, Any]:
    """What one process has after two steps with the gradients of so many ranks."""
    whole = Given(SHAPES, LOW)
    plain = optimizer_of(name, whole.parameters())
    for seed in (1, 2):
        step_plain(plain, whole, world, seed)
    return whole, plain


def made(name: str, group: Any, mb: float = 0.1) -> tuple[Given, Any]:
    model = Given(SHAPES, LOW)
    one = optimizer_of(name, model.parameters())
    return model, zero.shard(model, one, process_group=group, bucket_mb=mb)


def save(model: Any, optimizer: Any, path: Path, flat: bool = False, **how: Any) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    states = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(states, checkpoint_id=path, **how)


def load(model: Any, optimizer: Any, path: Path, flat: bool = False, **how: Any) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    states = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(states, checkpoint_id=path, **how)
    set_optimizer_state_dict(model, optimizer, states["optimizer"], options=options)
