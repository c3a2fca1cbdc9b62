"""Divisions of accumulated gradients, left to the optimizer's step.

A window ends with the sum of its gradients in `.grad`. The step divides the sum in the pass that
reads the gradients anyway, so that no pass is spent on the division. The divisor is handed over as
the optimizer's attribute `grad_scale`, as torch's GradScaler hands over its scale; under a scaler
it is the product of both. Code that needs the quotient before the step, such as unscaling and
clipping, asks this module to divide.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import _C
from .._torch.modes import is_watched
from .._torch.optim import increment_version
from .owners import ByOptimizer
from .params import grads_of, is_ours

_ATTRIBUTE = "grad_scale"


class Division:
    """The division of one optimizer: divisor, `grad_scale`, and the versions of the sums."""

    def __init__(self, optimizer: Optimizer, divisor: float) -> None:
        self.divisor = divisor
        self.sum_may_stay = is_ours(optimizer)  # torch's steps write the quotient to `.grad`
        # torch's fused kernels read a float32; ours take the divisor of fp64 parameters unrounded.
        dtype = torch.float64 if self.sum_may_stay else torch.float32
        grads = grads_of(optimizer)
        device = grads[0].device if grads else "cpu"
        self.scale = torch.tensor(divisor, dtype=dtype, device=device)
        dense = _dense(grads)
        self.versions = _versions_of(dense)
        self.first = weakref.ref(dense[0]) if dense else None


_waiting: ByOptimizer[Division] = ByOptimizer(weakly=False)


def _dense(grads: Iterable[Tensor]) -> list[Tensor]:
    return [grad for grad in grads if grad.layout is torch.strided]


def _versions_of(grads: Iterable[Tensor]) -> list[tuple[int, int]]:
    return [(grad.data_ptr(), grad._version) for grad in grads]


def takes_gradscale(optimizer: Optimizer) -> bool:
    """True if the step divides by `grad_scale`, as faststep's and torch's fused classes do.

    The step of a script's subclass may read `.grad`, where it must not find the sum.
    """
    if is_ours(optimizer):
        return not optimizer._has_own_step()
    official = type(optimizer).__module__.startswith("torch.optim.")
    return official and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def defer(optimizer: Optimizer, divisor: float) -> None:
    """Let the next step divide. Where it cannot, divide in place now.

    Raises:
        RuntimeError: the optimizer carries a `grad_scale` of somebody else.
    """
    settle(optimizer)
    if divisor == 1.0:
        return
    if not takes_gradscale(optimizer):
        scale(grads_of(optimizer), 1.0 / divisor)
        return
    if getattr(optimizer, _ATTRIBUTE, None) is not None:
        raise RuntimeError(
            f"{type(optimizer).__name__}.grad_scale is set already: it cannot carry the division "
            "of accumulated gradients as well"
        )
    division = Division(optimizer, divisor)
    _waiting.set(optimizer, division)
    setattr(optimizer, _ATTRIBUTE, division.scale)


def divisor_of(optimizer: Optimizer) -> float | None:
    """The divisor of the optimizer's next step, None if it does not divide."""
    division = _waiting.of(optimizer)
    return None if division is None else division.divisor


def settle(optimizer: Optimizer) -> Division | None:
    """Remove the pending division, done or dropped, and return it; None if there is none."""
    division = _waiting.pop(optimizer)
    # While a scaler steps, the scaler removes the attribute.
    lent = vars(optimizer).get(_ATTRIBUTE)
    if division is not None and lent is division.scale and "found_inf" not in vars(optimizer):
        delattr(optimizer, _ATTRIBUTE)
    return division


def repeat(optimizer: Optimizer, made: Division | None) -> None:
    """Register the division `made` again, if the last step left the sum in `.grad`.

    faststep's steps that clip leave the sum there; other steps write the quotient. The gradients
    must be the same tensors, because those of a later backward may have the same addresses.

    Raises:
        RuntimeError: a GradScaler makes the step.
    """
    if made is None or made.first is None or not made.sum_may_stay:
        return
    grads = _dense(grads_of(optimizer))
    if not grads or grads[0] is not made.first() or _versions_of(grads) != made.versions:
        return
    if getattr(optimizer, _ATTRIBUTE, None) is not None:
        raise RuntimeError(
            f"another step of {type(optimizer).__name__} under a GradScaler finds the sum of the "
            "last accumulation window, still scaled as it was then: call optimizer.zero_grad() "
            "after the step"
        )
    defer(optimizer, made.divisor)


def check(optimizer: Optimizer) -> None:
    """Raise if the gradients that the step will divide are not the window's sum."""
    division = _waiting.of(optimizer)
    if division is None:
        return
    if getattr(optimizer, _ATTRIBUTE, None) is None:  # an older torch's scaler drops it
        setattr(optimizer, _ATTRIBUTE, division.scale)
    if _versions_of(_dense(grads_of(optimizer))) != division.versions:
        raise RuntimeError(
            "gradients were changed (by clipping?) between the end of the accumulation window and "
            f"step(), where they are still a sum that step() divides by {division.divisor:g}. "
            "Clip with max_grad_norm= of the optimizer, with the clip_grad_norm_() of the object "
            "that accumulate() returned or, outside torch.compile, of faststep; or call "
            "normalize_() of that object before you change gradients"
        )


def divide(optimizer: Optimizer) -> None:
    """Divide in place now, in a pass of its own."""
    division = _waiting.of(optimizer)
    if division is not None:
        scale(grads_of(optimizer), 1.0 / division.divisor if division.divisor else math.inf)
        settle(optimizer)


def divide_grads_of(parameters: Iterable[Tensor]) -> None:
    """`divide` for each optimizer that has one of these parameters."""
    for optimizer in _waiting.having(parameters):
        divide(optimizer)


def divide_these(tensors: Iterable[Tensor]) -> None:
    """`divide` for each optimizer that has a gradient among these tensors."""
    for optimizer in _waiting.having(tensors, grads_of):
        divide(optimizer)


def unscaled(optimizer: Optimizer, inv_scale: Tensor) -> Tensor:
    """The factor that unscales gradients and divides them in one pass."""
    division = _waiting.of(optimizer)
    if division is None:
        return inv_scale
    return (inv_scale.double() / division.divisor).float()


def scale(grads: list[Tensor], factor: float) -> None:
    """Multiply in place; no pass for a factor of 1."""
    if factor == 1.0 or not grads:
        return
    if not is_watched() and _C.fusable(grads):
        _C.scale(grads, factor)
        increment_version(grads)
        return
    with torch.no_grad():
        for grad in grads:
            grad.mul_(factor)
