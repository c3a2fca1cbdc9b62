"""The step by torch's operators, for TorchDispatchModes and for tensors without memory.

A TorchDispatchMode (FakeTensorMode, a counter of operations) sees operators only. Tensors on
"meta", FakeTensors and mkldnn tensors have no memory that C could work on. torch's operators then
unscale the gradients, check them for overflow and clip them, and torch's class makes the update.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm  # which faststep.run replaces in torch

from .._torch.dtensor import full_tensor
from .._torch.optim import dtypes_of, is_torchs
from .request import StepAnswer, StepRequest

if TYPE_CHECKING:
    from .base import FusedOptimizer

__all__ = ["step_by_torch", "update_by_torch", "values_of"]


def values_of(grad: Tensor) -> Tensor:
    """The numbers of a gradient, each once; those of a sparse one that are stored."""
    return grad.coalesce().values() if grad.is_sparse else grad


@torch.no_grad()
def step_by_torch(optimizer: FusedOptimizer, request: StepRequest) -> StepAnswer:
    """Make the step."""
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"] if p.grad is not None]
    before: list[Tensor] = [p.grad for p in params]
    grads = before
    if request.refuses_fp16 and torch.float16 in dtypes_of(grads):
        raise ValueError("Attempting to unscale FP16 gradients.")
    if request.grad_scale is not None:
        inverse = request.grad_scale.double().reciprocal()
        grads = [grad * inverse.to(grad.device, grad.dtype) for grad in grads]
    norm = None
    if grads and request.measures:
        norm = full_tensor(get_total_norm(map(values_of, grads)))
    found = request.found_inf
    if request.looks_for_inf and found is not None:
        values = map(values_of, grads)
        finite = [full_tensor(torch.isfinite(some).all()).to(found.device) for some in values]
        found.fill_(0.0) if not finite else found.copy_(~torch.stack(finite).all())
    if found is not None and bool(found != 0.0):
        return StepAnswer(True, norm)
    if request.max_norm is not None and norm is not None:
        coefficient = torch.clamp(request.max_norm / (norm + 1e-6), max=1.0)
        grads = [grad * coefficient.to(grad.device, grad.dtype) for grad in grads]
    # torch's loops take no fp32 sum of bf16 gradients.
    cast = [grad.to(param.dtype) for param, grad in zip(params, grads, strict=True)]
    try:
        _set(params, cast)
        _update_without_scaler(optimizer)
    finally:
        _set(params, before)
    if request.write_grads:
        for old, new in zip(before, grads, strict=True):
            if new is not old:
                old.copy_(new)
    return StepAnswer(False, norm)


def _set(params: list[Tensor], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        if param.grad is not grad:
            param.grad = grad


def _update_without_scaler(optimizer: FusedOptimizer) -> None:
    """The update alone: torch's loops refuse what a scaler has set, which is done already."""
    lent = {name: vars(optimizer).pop(name, None) for name in ("grad_scale", "found_inf")}
    try:
        optimizer._update_by_torch()
    finally:
        vars(optimizer).update({name: value for name, value in lent.items() if value is not None})


def update_by_torch(optimizer: FusedOptimizer, after: type) -> None:
    """torch's own update, by the class that follows `after` in the order of bases."""
    order = type(optimizer).__mro__
    following = order[order.index(after) + 1 :]
    torchs = next(cls for cls in following if "step" in vars(cls))
    step = vars(torchs)["step"]
    if is_torchs(step):
        step = inspect.unwrap(step)  # without the hooks, which run around ours
    step(optimizer)
