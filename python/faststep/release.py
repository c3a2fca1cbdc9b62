"""Gradient release: each parameter is updated during backward, and its gradient freed at once."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from . import _C
from ._torch import disable_dynamo, increment_version, uncompiled
from .accumulation.owners import is_released, owner_of, set_released
from .optim._base import FusedOptimizer, Phase, Rule
from .optim._devices import Scalars, on_device, ordinal_of

__all__ = ["Release", "release_gradients"]

Clip = Literal["per_parameter", "lagged"]
_NO_CLIPPING = math.nan


class _Place:
    """Where a parameter is in the optimizer, and what the C side remembers of it."""

    def __init__(self, group: int, index: int, param: Tensor) -> None:
        self.group, self.index = group, index
        self.param = weakref.ref(param)
        self.plan = _C.Plan()
        self.updated = False  # since the last optimizer.step
        self.handle: Any = None


class Release:
    """The hooks that `release_gradients` has set; `remove()` takes them away."""

    def __init__(self, optimizer: FusedOptimizer, clip: Clip | None) -> None:
        self._clip = clip
        self._places: dict[int, _Place] = {}
        self._rules: dict[int, Rule] = {}
        self._scale: Tensor | None = None  # what this step's gradients are divided by
        self._square_sum = 0.0
        self._norm: float | None = None  # of all gradients of the last step
        self._optimizer = weakref.ref(optimizer)
        _check_clipping(optimizer, clip)
        owner = weakref.ref(self)

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if owner() is not None and getattr(optimizer, "grad_scale", None) is not None:
                raise RuntimeError(
                    "release_gradients() cannot skip a step for an overflow or unscale before it: "
                    "parameters were updated in backward already. Train in bfloat16 without a "
                    "GradScaler, or remove() the release"
                )

        def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (release := owner()) is not None:
                release._finish_step()

        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]
        self._attach(optimizer)

    def _attach(self, optimizer: FusedOptimizer) -> None:
        """Hook parameters that are new or were unfrozen; note where the others are now."""
        owner = weakref.ref(self)
        for group, entry in enumerate(optimizer.param_groups):
            for index, param in enumerate(entry["params"]):
                place = self._places.get(id(param))
                if place is not None and place.param() is param:
                    place.group, place.index = group, index
                elif param.requires_grad:
                    self._places[id(param)] = _hooked(owner, _Place(group, index, param), param)

    def _update(self, place: _Place, param: Tensor) -> None:
        """The step of one parameter, from its hook."""
        optimizer = self._optimizer()
        grad = param.grad
        if optimizer is None or grad is None:
            return
        if place.updated:
            raise RuntimeError(
                f"a second gradient of {_name(optimizer, place)} before optimizer.step(): with "
                "release_gradients() it was updated with the first one. Gradients cannot be "
                "accumulated; remove() the release for that"
            )
        _check_clipping(optimizer, self._clip)
        rule = self._rules.get(place.group)
        if rule is None:
            rule = optimizer._checked_rule_of(optimizer.param_groups[place.group])
            self._rules[place.group] = rule
        try:
            max_norm = self._coefficient(optimizer, grad)
            _step(optimizer, place, param, rule, self._scale, max_norm)
        except _C.TensorError as error:
            raise optimizer._explained(place.group, place.index, *error.args[2:]) from None
        place.updated = True
        param.grad = None

    def _coefficient(self, optimizer: FusedOptimizer, grad: Tensor) -> float:
        """Measure for the next step, scale this one; returns the norm to clip `grad` alone by."""
        limit = optimizer.max_grad_norm
        if limit is None or self._clip is None:
            return _NO_CLIPPING
        if self._clip == "lagged":
            self._square_sum += _C.measure([grad], 1.0)[0]
            if self._norm is not None:
                coefficient = limit / (self._norm + 1e-6)
                if coefficient >= 1.0:
                    self._scale = None
                elif self._scale is None:
                    divisor = 1.0 / coefficient if coefficient else math.inf
                    self._scale = torch.tensor(divisor, dtype=torch.float64)
                return _NO_CLIPPING
        return limit

    def _finish_step(self) -> None:
        """What is per step: after optimizer.step each parameter may be updated again."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if any(place.updated for place in self._places.values()):
            self._norm = math.sqrt(self._square_sum) if self._clip == "lagged" else None
            if self._norm is not None:
                optimizer._last_norm = self._norm
        for place in self._places.values():
            place.updated = False
        self._square_sum, self._scale = 0.0, None
        self._rules.clear()
        self._attach(optimizer)

    def remove(self) -> None:
        """Undo the release: gradients stay in `.grad` again, and `optimizer.step` uses them."""
        for place in self._places.values():
            place.handle.remove()
        for handle in self._handles:
            handle.remove()
        self._places.clear()
        self._handles.clear()
        optimizer = self._optimizer()
        if optimizer is not None:
            set_released(optimizer, None)


def release_gradients(
    model: nn.Module, optimizer: FusedOptimizer, *, clip: Clip | None = None
) -> Release:
    """Update each parameter in backward, while its gradient is in the cache, and free the gradient.

    The bits are those of `optimizer.step()`. The loop stays as it is: `optimizer.step()` finds no
    gradients and only ends the step; schedulers, parameter groups and `state_dict` work as ever.

    With `max_grad_norm` set on the optimizer exact clipping would need all gradients before the
    first update. Two approximations take its place, if asked for:

    * `clip="per_parameter"`: each gradient is clipped by its own norm to `max_grad_norm`, so
      the norm of all may be larger than that.
    * `clip="lagged"`: all gradients are clipped by the global norm of the step before, measured in
      the hooks; a spike acts once before it is clipped. The first step clips per parameter.

    Args:
        model: the module that the optimizer trains.
        optimizer: an optimizer of faststep.optim.
        clip: what `max_grad_norm` means. Default: None, it must not be set.

    Returns:
        A :class:`Release`; keep it. `remove()` undoes the release, as does dropping it.

    Raises:
        TypeError: an optimizer not of faststep, or a DistributedDataParallel model, whose
            gradients are reduced only after the hooks.
        ValueError: `clip` is unknown, or `max_grad_norm` is set without it; or it is "lagged" and a
            parameter is on CUDA.
        RuntimeError: the optimizer accumulates, or is released already. During training: a
            second gradient before `optimizer.step()`, or a GradScaler.

    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources"
    (LOMO), arXiv:2306.09782; torch's tutorial on optimizer steps in backward.
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"release_gradients() takes optimizers of faststep.optim, not "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(uncompiled(model), DistributedDataParallel):
        raise TypeError(
            "release_gradients() does not support DistributedDataParallel: it reduces gradients "
            "after the hooks that update parameters"
        )
    if clip not in (None, "per_parameter", "lagged"):
        raise ValueError(f'clip must be None, "per_parameter" or "lagged", not {clip!r}')
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if clip == "lagged" and any(param.is_cuda for param in params):
        raise ValueError('clip="lagged" measures on the CPU only, and a parameter is on CUDA')
    if owner_of(optimizer) is not None:
        raise RuntimeError(
            "gradients of this optimizer are accumulated (faststep.accumulate), so they cannot be "
            "released: call remove() on the accumulation first"
        )
    if is_released(optimizer):
        raise RuntimeError("gradients of this optimizer are released already")
    release = Release(optimizer, clip)
    set_released(optimizer, release)
    weakref.finalize(release, _undo, release._handles, release._places).atexit = False
    return release


def _undo(handles: list[Any], places: dict[int, _Place]) -> None:
    for handle in (*handles, *(place.handle for place in places.values())):
        handle.remove()


def _hooked(owner: Callable[[], Release | None], place: _Place, param: Tensor) -> _Place:
    @disable_dynamo
    def update(param: Tensor) -> None:
        if (release := owner()) is not None:
            release._update(place, param)

    place.handle = param.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
    return place


def _name(optimizer: Optimizer, place: _Place) -> str:
    names = optimizer.param_groups[place.group].get("param_names")
    return repr(names[place.index]) if names else f"parameter {place.index} of group {place.group}"


def _check_clipping(optimizer: FusedOptimizer, clip: Clip | None) -> None:
    if optimizer.max_grad_norm is not None and clip is None:
        raise ValueError(
            "max_grad_norm needs all gradients before the first update, which release_gradients() "
            'does not have. Set it to None, or pass clip="per_parameter" (each gradient by its own '
            'norm) or clip="lagged" (all by the norm of the step before)'
        )


def _step(
    optimizer: FusedOptimizer,
    place: _Place,
    param: Tensor,
    rule: Rule,
    scale: Tensor | None,
    max_norm: float,
) -> None:
    device = ordinal_of(param)
    scalars = {device: Scalars(None if scale is None else on_device(scale, device), None, None)}
    options = (scalars, False, max_norm, False, Phase.WHOLE)
    what, value = place.plan.step([[param]], [rule], optimizer.state, None, *options)
    if what == "missing":
        with torch.no_grad():
            optimizer._new_state(optimizer.param_groups[place.group], param)
        try:
            what, value = place.plan.step([[param]], [rule], optimizer.state, value, *options)
        except BaseException:
            optimizer._drop_new_state(param)
            raise
    if what == "memory":
        raise torch.OutOfMemoryError(f"{value}; the parameter was not updated")
    if what != "done":
        raise _C.TensorError(0, 0, "state", "value", "is None")
    increment_version(value[2])
