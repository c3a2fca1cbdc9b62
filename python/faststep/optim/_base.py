"""What the fused optimizers share: the step, the clipping options, and the errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._torch import disable_dynamo, increment_version

__all__ = ["FusedOptimizer", "Rule", "number"]

_NO_CLIPPING = math.nan


class Rule(NamedTuple):
    """How one parameter group is stepped; the C side reads it by position."""

    number: int
    state_keys: tuple[str, ...]  # "step" first where has_step, then the states in the rule's order
    has_step: bool
    hyper: tuple[float, ...]  # in the order of the rule's row in csrc/rules/rules.def
    maximize: bool


def number(value: float | Tensor) -> float:
    """A hyper-parameter that may be a one-element tensor."""
    return float(value.item() if isinstance(value, Tensor) else value)


class FusedOptimizer(torch.optim.Optimizer):
    """Mixin in front of a torch optimizer: steps all parameters of all groups in one C call.

    A class gives `_rule_of` and, where states are created at the first step, `_new_state`.

    Args (keyword-only, on top of the torch class):
        max_grad_norm (float, optional): clip all gradients by their global 2-norm inside the step,
            with the formula of :func:`torch.nn.utils.clip_grad_norm_`. Default: None, no clipping.
        keep_grads (bool): with `max_grad_norm`, write the unscaled and clipped gradients back
            to `.grad`. Default: False, `.grad` stays as backward left it.
    """

    # torch.amp.GradScaler then passes the scale as `grad_scale` and `found_inf`.
    _step_supports_amp_scaling = True
    _number_of: ClassVar[dict[str, int]] = {name: row[0] for name, row in _C.rules().items()}

    # Class attributes stand in where pickle and deepcopy restore an optimizer without __init__.
    max_grad_norm: float | None = None
    keep_grads: bool = False
    _plan: _C.Plan | None = None
    _measure_found_inf: bool = False  # set by faststep.amp.GradScaler around a step
    _step_max_norm: float | None = None
    _last_norm: float | None = None
    _skipped: bool = False

    def _set_clipping(self, max_grad_norm: float | None, keep_grads: bool) -> None:
        if max_grad_norm is not None and not max_grad_norm >= 0.0:
            raise ValueError(f"Invalid max_grad_norm value: {max_grad_norm}")
        self.max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
        self.keep_grads = bool(keep_grads)

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        """The rule and its numbers for this step of a group."""
        raise NotImplementedError

    def _new_state(self, group: dict[str, Any], param: Tensor) -> None:
        """Create the missing entries of `self.state[param]`."""
        raise NotImplementedError

    def _drop_new_state(self, param: Tensor) -> None:
        """Undo `_new_state` if the step did not happen, where zeros differ from no state."""

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The global 2-norm of the unscaled gradients before clipping, from the last step.

        A 0-d float32 tensor; None before the first step that measured (one with `max_grad_norm`, or
        under :class:`faststep.amp.GradScaler`).
        """
        return (
            None if self._last_norm is None else torch.tensor(self._last_norm, dtype=torch.float32)
        )

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step left everything as it was because a gradient was not finite."""
        return self._skipped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure (Callable, optional): reevaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._fused_step()
        return loss

    @disable_dynamo
    def _fused_step(self) -> None:
        groups = self.param_groups
        max_norm = self.max_grad_norm if self._step_max_norm is None else self._step_max_norm
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if self._plan is None:
            self._plan = _C.Plan()
        options = (
            grad_scale,
            # torch's scaler passes the number 0 where no parameter has a gradient
            found_inf if isinstance(found_inf, Tensor) else None,
            self._measure_found_inf,
            _NO_CLIPPING if max_norm is None else max_norm,
            grad_scale is not None if max_norm is None else self.keep_grads,
        )
        params = [group["params"] for group in groups]
        rules = [self._checked_rule_of(group) for group in groups]
        new: list[tuple[int, int]] = []
        try:
            result = self._plan.step(params, rules, self.state, None, *options)
            if isinstance(result, list):
                new = result
                with torch.no_grad():
                    for group, index in new:
                        self._new_state(groups[group], params[group][index])
                result = self._plan.step(params, rules, self.state, new, *options)
            if isinstance(result, list):  # a state was there, but None
                group, index = result[0]
                state = self.state[params[group][index]]
                key = next(key for key in rules[group].state_keys if state.get(key) is None)
                raise _C.TensorError(group, index, f"state '{key}'", "value", "is None")
        except BaseException as error:
            for group, index in new:
                self._drop_new_state(params[group][index])
            if isinstance(error, _C.TensorError):
                raise self._explained(*error.args) from None
            raise
        self._skipped, norm, written, grads = result
        increment_version(written)
        if grads is not None:
            increment_version(grads)
        if norm is not None:
            self._last_norm = norm
        if self._skipped:
            for group, index in new:
                self._drop_new_state(params[group][index])

    def _checked_rule_of(self, group: dict[str, Any]) -> Rule:
        if group.get("differentiable"):
            name = type(self).__name__
            raise RuntimeError(
                f"faststep.optim.{name} does not support differentiable=True; "
                f"use torch.optim.{name}"
            )
        return self._rule_of(group)

    def _explained(self, group: int, index: int, role: str, kind: str, detail: str) -> Exception:
        """The error for a tensor that cannot be used: torch's own where it has one."""
        param: Tensor = self.param_groups[group]["params"][index]
        sparse = param.grad is not None and param.grad.is_sparse
        if role == "gradient" and sparse:
            return RuntimeError(self._sparse_error())
        names = self.param_groups[group].get("param_names")
        name = f"'{names[index]}', " if names else ""
        whose = "" if role == "parameter" else f"{role} of "
        where = (
            f"{whose}parameter {index} in group {group} "
            f"({name}shape {tuple(param.shape)}, {param.dtype}, {param.device})"
        )
        error = TypeError if kind == "type" else RuntimeError
        return error(f"{type(self).__name__}: {where} {detail}; nothing was updated")

    def _sparse_error(self) -> str:
        name = type(self).__name__
        return f"faststep.optim.{name} does not support sparse gradients; use torch.optim.{name}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan = None  # what it remembers of the old state would keep small tensors of it alive

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "max_grad_norm": self.max_grad_norm, "keep_grads": self.keep_grads}
