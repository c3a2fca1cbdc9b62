"""The step by torch's operators, where C cannot make it.

A TorchDispatchMode (FakeTensorMode, a counter of operations) sees operators only, and autograd
records operators only (`differentiable=True`). Tensors on "meta", FakeTensors and mkldnn tensors
have no memory that C could work on; sparse gradients and complex parameters are left to torch.
torch's operators then unscale the gradients, check them for overflow and clip them, all by one
norm, and torch's class makes the update, or raises its error.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm  # which faststep.run replaces in torch

from .._devices import HOST
from .._torch.dtensor import full_tensor
from .._torch.optim import dtypes_of, is_torchs
from .request import StepAnswer, Steppable, StepRequest


class LeftToTorchError(RuntimeError):
    """A step that torch's class makes; whoever cannot let it do so fails with this."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} needs the step of torch's class; nothing was updated")
        self.reason = reason


def values_of(grad: Tensor) -> Tensor:
    """The numbers of a gradient, each once; those of a sparse one that are stored."""
    return grad.coalesce().values() if grad.is_sparse else grad


def leave_to_torch(group: dict[str, Any], devices: tuple[int, ...]) -> None:
    """Raise if autograd has to record the steps of a group, or if torch refuses them."""
    if group.get("differentiable"):
        raise LeftToTorchError("differentiable=True")
    if not group.get("capturable") or group.get("fused") or HOST not in devices:
        return
    if any(param.is_cpu and param.grad is not None for param in group["params"]):
        raise LeftToTorchError("capturable=True")


def step_by_torch(optimizer: Steppable, request: StepRequest) -> StepAnswer:
    """Make the step; autograd records it where it records torch's."""
    if optimizer._stepper is not None:
        optimizer._stepper.leave_to_torch()
    with torch.set_grad_enabled(bool(optimizer.defaults.get("differentiable"))):
        return _step(optimizer, request)


def _step(optimizer: Steppable, request: StepRequest) -> StepAnswer:
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"] if p.grad is not None]
    before: list[Tensor] = [p.grad for p in params]
    grads = before
    if request.refuses_fp16 and torch.float16 in dtypes_of(grads):
        raise ValueError("Attempting to unscale FP16 gradients.")
    if request.grad_scale is not None:
        # As torch's scaler, which also looks for overflows before it adds up other entries.
        narrow = torch.float16
        grads = [g.coalesce() if g.is_sparse and g.dtype is narrow else g for g in grads]
        inverse = request.grad_scale.double().reciprocal()
        grads = [grad * inverse.to(grad.device, grad.dtype) for grad in grads]
    norm = None
    if grads and request.measures:
        norm = full_tensor(get_total_norm(map(values_of, grads)))
    found = request.found_inf
    if request.looks_for_inf and found is not None:
        values = [grad._values() if grad.is_sparse else grad for grad in grads]
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
        with torch.no_grad():
            for old, new in zip(before, grads, strict=True):
                if new is not old:
                    old.copy_(new)
    return StepAnswer(False, norm)


def _set(params: list[Tensor], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        if param.grad is not grad:
            param.grad = grad


def _update_without_scaler(optimizer: Steppable) -> None:
    """The update alone: torch's loops refuse what a scaler has set, which is done already."""
    lent = {name: vars(optimizer).pop(name, None) for name in ("grad_scale", "found_inf")}
    try:
        optimizer._update_by_torch()
    finally:
        vars(optimizer).update({name: value for name, value in lent.items() if value is not None})


def torchs_class(optimizer: Steppable, after: type) -> type | None:
    """The class of torch that makes the update: it follows `after` in the order of bases."""
    order = type(optimizer).__mro__
    following = order[order.index(after) + 1 : order.index(torch.optim.Optimizer)]
    return next((cls for cls in following if "step" in vars(cls)), None)


def update_by_torch(optimizer: Steppable, after: type) -> None:
    """torch's own update.

    Groups that torch may refuse come first, so that none is updated before the error.
    """
    torchs = torchs_class(optimizer, after)
    assert torchs is not None
    groups, known = optimizer.param_groups, set(optimizer.state)
    optimizer.param_groups = sorted(groups, key=lambda group: not _may_be_refused(group))
    try:
        step = vars(torchs)["step"]
        if is_torchs(step):
            step = inspect.unwrap(step)  # without the hooks, which run around ours
        step(optimizer)
    except BaseException:
        for param in set(optimizer.state) - known:
            if optimizer.state[param].get("step", 1) == 0:
                del optimizer.state[param]
        raise
    finally:
        optimizer.param_groups = groups


def _may_be_refused(group: dict[str, Any]) -> bool:
    """True if it is captured, or some gradients are sparse or complex."""
    grads = (param.grad for param in group["params"] if param.grad is not None)
    return bool(group.get("capturable")) or any(g.is_sparse or g.is_complex() for g in grads)
