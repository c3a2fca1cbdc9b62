"""Changes around a model's forward: precision, compilation, checkpoints, windows of steps.

A model is the outermost module with parameters that a thread calls.
"""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..accumulation import accumulate as begin
from ..memory.recompute import Recomputed
from ..zero import shard
from ..zero.stage3.blocks import blocks_of


def autocast(dtype: torch.dtype) -> None:
    """Let models run under autocast, with floating-point results of theirs in fp32.

    The loss outside of a model is computed in fp32 from these.
    """

    def around(call: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device = next(model.parameters()).device.type
        with torch.autocast(device, dtype):
            result = call(model, *args, **kwargs)
        return _in_fp32(result, dtype)

    _wrap_models(around)


def compile_models() -> None:
    """Let models be compiled when they are called first."""
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def compile_once(model: nn.Module) -> None:
        if model not in seen:
            seen.add(model)
            model.compile()

    _before_calls(compile_once)


def freeze_objects() -> None:
    """Let the garbage collector leave out what is there when a model is called first to train."""

    def freeze(model: nn.Module) -> bool:
        if is_first := _is_trained(model):
            gc.collect()
            gc.freeze()
        return is_first

    _before_calls(freeze)


def use_channels_last() -> None:
    """Let the weights of two-dimensional convolutions that are made from now on lie in that way."""
    for kind in (nn.Conv2d, nn.ConvTranspose2d):
        _when_made(kind, _lay_out)


def _lay_out(module: nn.Conv2d | nn.ConvTranspose2d) -> None:
    weight = module.weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def accumulate(steps: int) -> None:
    """Let the script's loop accumulate gradients over windows of so many steps.

    Begins with the first model that is called to train, with all optimizers, the scaler and the
    schedulers that were made until then.
    """
    kinds = (torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
    optimizers, scalers, schedulers = map(_kept, kinds)

    def install(model: nn.Module) -> bool:
        if is_first := bool(optimizers) and _is_trained(model):
            window = begin(optimizers, steps, model=model)
            window.install(scaler=scalers[-1] if scalers else None, scheduler=schedulers)
        return is_first

    _before_calls(install)


def checkpoint_blocks() -> None:
    """Let the blocks of models be computed again in backward, so that less is kept for it.

    They are those of a class of which a model has several. Blocks with running statistics, which
    would be updated twice, are left out.
    """
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    found: list[nn.Module] = []

    def put(model: nn.Module) -> None:
        if model not in seen:
            seen.update(model.modules())  # in backward those of a block are called by themselves
            for block in itertools.filterfalse(_has_statistics, blocks_of(model)):
                Recomputed(block).put()
                found.append(block)
            if not found:
                raise ValueError("the model has no blocks that can be computed again")

    _before_calls(put)


def _has_statistics(block: nn.Module) -> bool:
    return any(name.endswith("running_mean") for name, _ in block.named_buffers())


def shard_models(stage: Literal[1, 2]) -> None:
    """Let the optimizer of a model of DistributedDataParallel be sharded, and step in its place.

    Raises, when the model is called first: ValueError, there are several optimizers, or a scaler.
    """
    optimizers, scalers = _kept(torch.optim.Optimizer), _kept(torch.amp.GradScaler)

    def put(model: nn.Module) -> bool:
        if is_first := bool(optimizers) and type(model) is DistributedDataParallel:
            if len(optimizers) > 1 or scalers:
                raise ValueError("only a script with one optimizer, and no scaler, can be sharded")
            [optimizer] = optimizers
            sharded = shard(model, optimizer, stage=stage)
            optimizer.step, optimizer.zero_grad = sharded.step, sharded.zero_grad
        return is_first

    _before_calls(put)


def _is_trained(model: nn.Module) -> bool:
    return model.training and torch.is_grad_enabled()


def _kept(kind: Any) -> list[Any]:
    """The list of the objects of a class and its subclasses that are made from now on."""
    made: list[Any] = []
    _when_made(kind, made.append)
    return made


def _when_made(kind: Any, act: Callable[[Any], object]) -> None:
    """Call a function with each object of a class and its subclasses that is made from now on."""
    make = kind.__init__

    @functools.wraps(make)
    def init(one: Any, *args: Any, **kwargs: Any) -> None:
        make(one, *args, **kwargs)
        act(one)

    kind.__init__ = init


def _before_calls(act: Callable[[nn.Module], bool | None]) -> None:
    """Call a function with a model before each call of one, until it returns True."""
    is_done = False

    def around(call: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_done
        is_done = is_done or bool(act(model))
        return call(model, *args, **kwargs)

    _wrap_models(around)


def _wrap_models(around: Callable[..., Any]) -> None:
    """Let calls of models go through a function, which gets how to call one, and the model."""
    call: Callable[..., Any] = nn.Module.__call__
    inside = threading.local()

    @functools.wraps(call)
    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(inside, "is_model", False):
            return call(module, *args, **kwargs)
        if next(module.parameters(), None) is None:  # a loss, say
            return call(module, *args, **kwargs)
        inside.is_model = True
        try:
            return around(call, module, *args, **kwargs)
        finally:
            inside.is_model = False

    nn.Module.__call__ = called  # type: ignore[method-assign]


def _in_fp32(result: Any, dtype: torch.dtype) -> Any:
    """A result with its tensors of a dtype in fp32."""
    if isinstance(result, torch.Tensor):
        return result.float() if result.dtype == dtype else result
    if isinstance(result, Mapping):
        changed = {key: _in_fp32(value, dtype) for key, value in result.items()}
        made: Any = type(result)
        return made(changed)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(_in_fp32(value, dtype) for value in result))
    if isinstance(result, (list, tuple)):
        return type(result)(_in_fp32(value, dtype) for value in result)
    return result
