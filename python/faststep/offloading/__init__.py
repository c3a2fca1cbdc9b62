"""Offload: optimizer states and their updates in host memory, beside parameters on a device."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from .._torch.dtensor import any_dtensor
from ..grads.owners import offloading, releasing
from ..grads.params import params_of
from ..optim.adafactor import Adafactor
from ..optim.base import FusedOptimizer
from ..optim.state_kinds import all_kinds
from ..optim.wrapped import unwrapped
from ..release.before_step import refuse_code_before_step
from .memory import MOST_THREADS
from .offloaded import Offload

__all__ = ["Offload", "offload"]


def offload(
    optimizer: Optimizer,
    fraction: float = 1.0,
    *,
    model: nn.Module | None = None,
    in_backward: bool = False,
    threads: int | None = None,
) -> Offload:
    """Keep an optimizer's states in host memory, and update its parameters there.

    The optimizer stays what it is: the loop, schedulers, scalers, clipping, parameter groups and
    state dicts work as ever, and the bits are those of a step without offload. Gradients are copied
    to the host in backward, as they become ready. `optimizer.step()` updates tile by tile, on
    threads of its own, while other tiles are copied back.

    A gradient that a script changes after backward is copied again. So is a parameter that it
    writes. Both are seen by torch's version counters: a write through `.data` is not.

    Args:
        optimizer: an optimizer of faststep.optim; one that accelerate has wrapped is unwrapped.
        fraction: the share of the elements whose states lie in host memory; the last parameters
            keep theirs on the device. Default: 1.0, all.
        model: the module that the optimizer trains. `step()` then returns before all parameters
            are back, and each module waits for its own in its forward. Who reads a parameter
            past its module calls `wait()` first. Default: None, `step()` waits.
        in_backward: begin the update in backward and free each gradient, as
            :func:`faststep.release_gradients` does: one backward per step, no scaler, and no
            clipping but by `max_grad_norm`, with which the update begins at the step.
            Default: False.
        threads: how many threads update. Default: None, one per core but the first.

    Returns:
        An :class:`.Offload`, which the optimizer keeps. `remove()` undoes the offload.

    Raises:
        TypeError: an optimizer not of faststep, or a subclass with a step of its own; `model` is no
            module.
        ValueError: `fraction` is not from 0 to 1, or `threads` not from 1 to 256.
        RuntimeError: the optimizer is offloaded or released already.
        NotImplementedError: the optimizer is Adafactor; parameters are those of
            FullyShardedDataParallel, or DTensors beside `model` or `in_backward`; CUDA parameters
            lie on several devices or with gaps.

    Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training",
    arXiv:2101.06840.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction must be from 0 to 1, not {fraction}")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads must be from 1 to {MOST_THREADS}, not {threads}")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    inside = _checked(optimizer, in_backward, in_backward or model is not None)
    offloaded = Offload(inside, fraction, in_backward, threads)
    if model is not None:
        offloaded._copies.wait_in_forward(model)
    return offloaded


def _checked(optimizer: Optimizer, in_backward: bool, needs_whole: bool) -> FusedOptimizer:
    """The optimizer that accelerate may have wrapped; raises for one that cannot be offloaded."""
    inside = unwrapped(optimizer, "offload()")
    kind = f"{type(inside).__module__}.{type(inside).__name__}"
    if isinstance(inside, Adafactor):
        raise NotImplementedError("offload() does not take Adafactor so far: use AdamW or Lion")
    if not isinstance(inside, FusedOptimizer):
        raise TypeError(f"offload() takes optimizers of faststep.optim, not {kind}")
    if inside._has_own_step():
        raise TypeError(f"offload() takes optimizers with the step of faststep.optim, not {kind}")
    if inside in offloading:
        raise RuntimeError("this optimizer is offloaded already")
    if inside in releasing:
        raise RuntimeError(
            "gradients of this optimizer are released (release_gradients): remove() the release, "
            "and pass in_backward=True to offload()"
        )
    if needs_whole and any_dtensor(params_of(inside)):
        raise NotImplementedError(
            "offload() does not take DTensors with in_backward= or model= so far"
        )
    if in_backward:
        refuse_code_before_step(inside, None)
    if in_backward and any(kinds.noise_seed is not None for kinds in all_kinds(inside)):
        raise NotImplementedError(
            'in_backward=True rounds states to the nearest: leave rounding="stochastic" away'
        )
    return inside
