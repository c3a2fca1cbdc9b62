"""Sharding as a configuration of DeepSpeed says."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ... import optim
from ..._torch.compiler import uncompiled
from ...amp import GradScaler
from ..optimizer import ShardedOptimizer
from .reader import AUTO, Reader
from .schedulers import SCHEDULERS
from .settings import Settings, settings_of

__all__ = ["Loop", "from_deepspeed_config", "lines_for"]


class Loop(NamedTuple):
    """What a script's loop calls, where DeepSpeed's engine does it by itself.

    Args:
        accumulation_steps: for :func:`faststep.accumulate`.
        micro_batch_size: samples of one forward on a rank; None if the configuration does not say.
        scaler: scales nothing without fp16.
        scheduler: of the learning rate; None without one.
    """

    accumulation_steps: int
    micro_batch_size: int | None
    scaler: GradScaler
    scheduler: torch.optim.lr_scheduler.LRScheduler | None


def from_deepspeed_config(
    model: nn.Module,
    optimizer: Optimizer | None,
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    process_group: Any = None,
) -> ShardedOptimizer:
    """Shard a model as a configuration of DeepSpeed says.

    ::

        optimizer = faststep.zero.from_deepspeed_config(model, None, "ds_config.json")
        scaler, scheduler = optimizer.loop.scaler, optimizer.loop.scheduler
        accum = faststep.accumulate(optimizer, optimizer.loop.accumulation_steps)
        for x, y in loader:
            with accum:
                accum.backward(scaler.scale(loss_fn(model(x), y)))
            if accum.ready:
                scaler.step(optimizer)  # clips by gradient_clipping
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()

    `optimizer.not_honoured` names the keys that have no effect, dotted. With "fp16" or "bf16" the
    model is cast, as by DeepSpeed, so its inputs must have that type. See docs/plan.md.

    Args:
        model: the module that the loop calls.
        optimizer: as for :func:`shard`. None makes the one of the section "optimizer"; otherwise
            that section is not honoured.
        config: the file, or a dict with the same keys.
        process_group: as for :func:`shard`. Default: None.

    Returns:
        What :func:`shard` returns, with `not_honoured` and `loop`, a :class:`.Loop`.

    Raises:
        ValueError: a value that is wrong, an optimizer that faststep does not have, or an "auto"
            that the optimizer or the scheduler needs. The error has the file and the key.
        OSError: the file cannot be read.
    """
    return _sharded(model, optimizer, Reader(config), process_group)


def _sharded(
    model: nn.Module, optimizer: Optimizer | None, reader: Reader, process_group: Any
) -> ShardedOptimizer:
    from .. import shard

    ranks = dist.get_world_size(process_group) if dist.is_initialized() else 1
    itemsize = max((param.itemsize for param in model.parameters()), default=4)
    asked = settings_of(reader, itemsize, ranks, optimizer is not None, strict=True)
    if optimizer is None and asked.kind is None:
        raise reader.error("optimizer", "is missing, and the script passes no optimizer")
    if asked.scheduler is not None:  # what can be refused is, before the model is changed
        _scheduler(reader, asked, torch.optim.SGD([torch.zeros(1)], lr=1.0))
    if optimizer is None:
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = _called(
            reader, "optimizer.params", getattr(optim, asked.kind or ""), params, asked.options
        )
    if asked.dtype is not None:
        uncompiled(model).to(getattr(torch, asked.dtype))
    device = next((param.device.type for param in model.parameters()), "cpu")
    sharded = shard(model, optimizer, process_group=process_group, **asked.shard)
    scheduler = None if asked.scheduler is None else _scheduler(reader, asked, sharded)
    scaler = GradScaler(device, enabled=asked.scaler is not None, **(asked.scaler or {}))
    sharded.not_honoured = asked.not_honoured
    sharded.loop = Loop(asked.steps, asked.micro_batch, scaler, scheduler)
    return sharded


def _scheduler(reader: Reader, asked: Settings, optimizer: Optimizer) -> LRScheduler:
    kind = SCHEDULERS[asked.scheduler or ""]
    made: LRScheduler = _called(reader, "scheduler.params", kind, optimizer, asked.rates)
    return made


def _called(reader: Reader, section: str, kind: Any, first: Any, options: dict[str, Any]) -> Any:
    """An object of a class; an error names the section, or the key."""
    known = inspect.signature(kind).parameters
    strange = next((name for name in options if name not in known), None)
    if strange is not None:
        raise reader.error(f"{section}.{strange}", f"is no argument of {kind.__name__}")
    try:
        return kind(first, **options)
    except (TypeError, ValueError) as error:
        raise reader.error(section, f"do not fit {kind.__name__}: {error}") from error


def lines_for(config: str | os.PathLike[str] | Mapping[str, Any]) -> list[str]:
    """What a script says in place of a configuration of DeepSpeed.

    Raises:
        ValueError: a value that is wrong.
    """
    asked = settings_of(Reader(config), 4, None, own=False, strict=False)
    lines = [f"model.to(torch.{asked.dtype})"] if asked.dtype else []
    if asked.kind:
        lines.append(_call(f"optimizer = faststep.optim.{asked.kind}", "params", asked.options))
    lines.append(_call("optimizer = faststep.zero.shard", "model, optimizer", asked.shard))
    if asked.scaler is not None:
        lines.append(_call("scaler = faststep.amp.GradScaler", '"cuda"', asked.scaler))
    if asked.scheduler:
        kind = f"scheduler = faststep.zero.deepspeed.schedulers.{asked.scheduler}"
        lines.append(_call(kind, "optimizer", asked.rates))
    if asked.steps > 1:
        lines.append(f"accum = faststep.accumulate(optimizer, {asked.steps})")
    lines += [f"# not honoured: {key}" for key in asked.not_honoured]
    return lines


def _call(function: str, first: str, options: Mapping[str, Any]) -> str:
    written = {key: "..." if value == AUTO else repr(value) for key, value in options.items()}
    return f"{function}({', '.join([first, *(f'{k}={v}' for k, v in written.items())])})"
