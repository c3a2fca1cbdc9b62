"""Gradient release: each parameter is updated during backward, and its gradient freed at once."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._torch.compiler import uncompiled
from .._torch.fsdp import is_fsdp_shard, shards_of_fsdp
from ..grads.buckets import Reduced
from ..grads.owners import accumulating, offloading, releasing
from ..grads.params import params_of
from ..optim.base import FusedOptimizer
from ..optim.wrapped import unwrapped
from .before_step import refuse_code_before_step
from .clip_modes import Clip, check_clipping
from .updates import Release

__all__ = ["Release", "release_gradients"]


def release_gradients(
    model: nn.Module, optimizer: Optimizer, *, clip: Clip | None = None
) -> Release:
    """Update each parameter in backward, while its gradient is in the cache, and free the gradient.

    On a CUDA device parameters wait until their gradients have 64 MB, or for the end of backward.

    The bits are those of `optimizer.step()`. The loop stays as it is: `optimizer.step()` finds no
    gradients and only ends the step; schedulers, parameter groups and `state_dict` work as ever.

    The optimizer's states are made at once: made in backward they would lie between gradients, and
    malloc could not give back what is freed there.

    With `max_grad_norm` set on the optimizer exact clipping would need all gradients before the
    first update. Two approximations take its place, if asked for:

    * `clip="per_parameter"`: each gradient is clipped by its own norm to `max_grad_norm`, so
      the norm of all may be larger than that.
    * `clip="lagged"`: all gradients are clipped by the global norm of the step before, measured in
      the hooks; a spike acts once before it is clipped. The first step clips per parameter.

    Under DistributedDataParallel parameters are updated as soon as their bucket is reduced, with
    the bits of the step after backward; gradients are freed at the end of backward. Its buckets
    stay, so that less memory is saved. Micro-steps inside `no_sync()` are added up before.
    DistributedDataParallel cannot let go of a communication hook: after `remove()` the one set here
    reduces as if there were none.

    With a model of `fully_shard` (FSDP2) each rank updates its part of a parameter when FSDP2 has
    reduced the gradient, in host memory with `CPUOffloadPolicy`. Micro-steps are added up inside of
    FSDP2 by `set_requires_gradient_sync(False)`.

    Args:
        model: the module that the optimizer trains.
        optimizer: an optimizer of faststep.optim; one that accelerate has wrapped is unwrapped.
        clip: what `max_grad_norm` means. Default: None, it must not be set.

    Returns:
        A :class:`.Release`; keep it. `remove()` undoes the release, as does dropping it.

    Raises:
        TypeError: an optimizer not of faststep, or a subclass with a step of its own; a
            DistributedDataParallel model with a communication hook of its own, with
            `find_unused_parameters` or with `static_graph`;
            parameters of FullyShardedDataParallel or of a tensor class with operators of its own,
            such as DTensors that `fully_shard` has not made of the parameters of `model`.
        ValueError: `clip` is unknown, or `max_grad_norm` is set without it; or it is "lagged" and a
            parameter is on CUDA; or it is set and `model` is one of `fully_shard`; or accelerate's
            own accumulation is on.
        RuntimeError: accelerate steps with a GradScaler; the optimizer accumulates, or is released
            already; another released optimizer has one of the parameters; a hook runs before the
            step, or a script has replaced the step. During training: the last two; a second
            gradient before `optimizer.step()`; a learning rate (or another number of a group) that
            changes between backward and step; a GradScaler; or gradients that a
            DistributedDataParallel reduces, which is not `model`.

    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources"
    (LOMO), arXiv:2306.09782; torch's tutorial on optimizer steps in backward.
    """
    optimizer = _checked(optimizer)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if clip not in (None, "per_parameter", "lagged"):
        raise ValueError(f'clip must be None, "per_parameter" or "lagged", not {clip!r}')
    inner = uncompiled(model)
    shards = shards_of_fsdp(inner)
    _refuse_wrappers(optimizer, shards)
    if clip is not None and shards:
        raise ValueError(
            f"clip={clip!r} needs norms of whole gradients, and fully_shard leaves a part on each "
            "rank: train without clip"
        )
    if clip == "lagged" and any(param.is_cuda for param in params_of(optimizer)):
        raise ValueError('clip="lagged" measures on the CPU only, and a parameter is on CUDA')
    _check_unowned(optimizer)
    refuse_code_before_step(optimizer, None)
    check_clipping(optimizer, clip)
    reduced = _reduced_by(inner) if isinstance(inner, DistributedDataParallel) else None
    release = Release(optimizer, clip, reduced, inner)
    releasing.set(optimizer, release)
    return release


def _checked(optimizer: Optimizer) -> FusedOptimizer:
    """The optimizer that accelerate may have wrapped; raises for one without our step."""
    scaler = getattr(optimizer, "scaler", None)
    inside = unwrapped(optimizer, "release_gradients()")
    if inside is not optimizer and scaler is not None:
        raise RuntimeError(
            f"{type(optimizer).__name__} steps with a {type(scaler).__name__}, which looks at all "
            "gradients before the first update: train in bfloat16, or without release_gradients()"
        )
    if not isinstance(inside, FusedOptimizer):
        raise TypeError(
            f"release_gradients() takes optimizers of faststep.optim, not "
            f"{type(inside).__module__}.{type(inside).__name__}"
        )
    if inside._has_own_step():
        raise TypeError(
            f"release_gradients() would pass by {type(inside).__name__}.step(), which finds no "
            "gradients: it takes optimizers with the step of faststep.optim"
        )
    return inside


def _check_unowned(optimizer: FusedOptimizer) -> None:
    """Raise if the gradients of the optimizer are handled already."""
    if optimizer in accumulating:
        raise RuntimeError(
            "gradients of this optimizer are accumulated (faststep.accumulate), so they cannot be "
            "released: call remove() on the accumulation first"
        )
    if optimizer in offloading:
        raise RuntimeError(
            "this optimizer is offloaded, and offload(in_backward=True) releases gradients itself"
        )
    if optimizer in releasing:
        raise RuntimeError("gradients of this optimizer are released already")


def _reduced_by(model: DistributedDataParallel) -> Reduced:
    """The communication hook of the model; raises if another release uses it."""
    reduced = Reduced.of(model, "release_gradients()")
    if reduced.user is not None:
        raise RuntimeError(
            "gradients of this DistributedDataParallel model are released already, with "
            "another optimizer: give all parameters to one optimizer"
        )
    return reduced


def _refuse_wrappers(optimizer: FusedOptimizer, shards: set[int]) -> None:
    """Raise for parameters whose gradients are not in the memory that a hook would update.

    Hooks of `shards`, the ids of FSDP2's parameters, are called with the reduced gradient.
    """
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if id(param) in shards:
                continue
            if type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__:
                what = f"is a {type(param).__name__}, a tensor subclass with operators of its own"
            elif is_fsdp_shard(param):
                what = "is reduced and sharded after its hook, by FullyShardedDataParallel"
            else:
                continue
            what += ", which release_gradients() does not support"
            raise optimizer._explained(number, index, "parameter", "type", what)
