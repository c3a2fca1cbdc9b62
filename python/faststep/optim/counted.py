"""Optimizers that count their steps: new states, and torch's errors."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .._torch.optim import is_capturing, step_dtype
from .base import FusedOptimizer, number
from .masters import new_dtype
from .request import Rule


class CountedOptimizer(FusedOptimizer):
    """Base of the optimizers whose state begins with `step`.

    States begin as zeros unless a class has `_new_tensor`. `_numbers` names 0-d states beside
    `step`, which follow it, and which begin as `_first_number` says.
    """

    # New states have the learning rate in them. If it changes before the first step that happens,
    # that counts: so states are dropped after a step that did not happen.
    _begins_by_rate: ClassVar[bool] = False

    def _new_tensor(self, group: dict[str, Any], rule: Rule, param: Tensor, key: str) -> Tensor:
        """A new state of the parameter's shape."""
        return self._zeros.like(param, new_dtype(self, group, rule, param, key))

    def _first_number(self, group: dict[str, Any], key: str) -> float:
        """The first value of a 0-d state."""
        return 1.0

    def _new_state(self, group: dict[str, Any], rule: Rule, param: Tensor) -> None:
        state = self.state[param]
        if state:  # with its counter on another device, as torch keeps it, or of another type
            for key in ("step", *self._numbers):
                if isinstance(value := state[key], Tensor):
                    dtype = value.dtype
                    if key == "step" and param.is_cuda and dtype != torch.float64:
                        dtype = torch.float32  # kernels count in these two
                    state[key] = value.to(param.device, dtype)
            return
        fused = group.get("fused")
        on_device = group.get("capturable") or fused or param.is_cuda
        device = param.device if on_device else "cpu"
        made = {"step": self._zeros.scalar(step_dtype(fused), device)}
        for key in self._numbers:
            made[key] = self._zeros.scalar(step_dtype(fused), device)
            made[key].fill_(self._first_number(group, key))
        for key in self._formula_of(group).state_keys[len(made) :]:
            made[key] = self._new_tensor(group, rule, param, key)
        state.update(made)  # all or none, should memory run out

    def _drop_new_state(self, param: Tensor) -> None:
        state = self.state.get(param) if self._begins_by_rate else None
        if state and number(state["step"]) == 0:  # not one that was there, and moved to a device
            state.clear()

    def _zeros_differ(self, group: dict[str, Any]) -> bool:
        return self._begins_by_rate

    def _check_capture(self) -> None:
        if is_capturing() and not all(group.get("capturable") for group in self.param_groups):
            raise RuntimeError(
                "Attempting CUDA graph capture of step() for an instance of "
                f"{type(self).__name__} but param_groups' capturable is False."
            )
