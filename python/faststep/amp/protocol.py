"""The attributes through which a scaler tells an optimizer to unscale and skip by itself.

The scaler sets them for the time of one step: `grad_scale`, the 0-d float32 scale that is
still in the gradients (None where they are unscaled), and `found_inf`, 0-d float32, not 0 where
the step must be skipped. This is torch's protocol for its fused optimizers. faststep's optimizers
know one more, `_asked`: a `ScalerRequest` says whether the step itself looks for overflows and
writes `found_inf`, and to which global norm it clips. `step_with` of optim/request.py sets all
three, and `request_of` reads them.

Only the quick ways of faststep's scaler ask for steps that look for overflows. Where a script could
tell that from torch's way, `can_be_seen` says so, and the scaler takes torch's way.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import _C
from .._torch.modes import is_watched
from .._torch.optim import global_post_hooks, global_pre_hooks
from ..grads.owners import unscaling
from ..optim.base import FusedOptimizer


class AskedToUnscale:
    """Lets the step of an optimizer unscale the gradients, under every scaler, until `remove()`.

    Otherwise torch's GradScaler unscales them before the step, and the step sees no scale.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = None if optimizer._is_asked_to_unscale else weakref.ref(optimizer)
        if self._optimizer is not None:
            unscaling.set(optimizer, self)
        optimizer._is_asked_to_unscale = True

    def remove(self) -> None:
        """Undo it, unless the optimizer was asked to unscale before."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            vars(optimizer).pop("_is_asked_to_unscale", None)
            unscaling.pop(optimizer)
        self._optimizer = None


def can_be_seen(optimizer: FusedOptimizer) -> bool:
    """True if anybody could see how often `step` is called, or what the gradients are then.

    Hooks and steps of a script can; so can a profiler. The wrapper of a scheduler sees only that it
    is called.
    """
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or global_pre_hooks
        or global_post_hooks
        or optimizer._has_replaced_step()
        or _C.is_recorded()
        or is_watched()
        or torch.compiler.is_compiling()
    )


def takes_found_inf(optimizer: Optimizer) -> bool:
    """True for optimizers that skip and unscale by themselves, as torch's fused ones do.

    Those whose step takes a `grad_scaler` follow an older protocol, which torch handles.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return "grad_scaler" not in inspect.signature(optimizer.step).parameters


def any_found(found: Iterable[Tensor], device: torch.device) -> Tensor:
    """A new 0-d float32 tensor: 1 if any flag is, else 0."""
    flags = [flag.to(device, non_blocking=True) for flag in found]
    if len(flags) == 1:
        return flags[0].clone()
    total = torch.zeros((), dtype=torch.float32, device=device)
    for flag in flags:
        total += flag
    return total.ne_(0.0)
