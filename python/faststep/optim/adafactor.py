"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) with torch's class, arguments and state."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._devices import HOST
from .._torch.modes import watched_by
from .._torch.optim import increment_version
from ..grads.params import described
from .base import number
from .hooked import HookedOptimizer
from .plan_step import Scalars
from .request import Rule
from .step import loss_of

_LEFT = "parameters that are not dense CPU tensors of one dtype, as their gradients and states are"
_NUMBER = _C.rules()["adafactor"][0]
_STATES = ("step", "row_var", "col_var", "variance")
_ON_HOST = {HOST: Scalars(None, None, None)}
Params = list[list[Tensor]]


def _rule_of(group: dict[str, Any]) -> Rule:
    """The numbers that the step of a group computes with."""
    lr = group["lr"]
    eps1, eps2 = group["eps"]
    if eps1 is None:  # as torch with foreach=False: that of the first parameter, for all
        first = next((p for p in group["params"] if p.grad is not None), None)
        eps1 = 0.0 if first is None or first.is_complex() else torch.finfo(first.dtype).eps
    hyper = (number(lr), group["beta2_decay"], eps1, eps2, group["d"], group["weight_decay"])
    return Rule(_NUMBER, _STATES, True, hyper, group["maximize"])


class Adafactor(HookedOptimizer, torch.optim.Adafactor):
    """torch.optim.Adafactor, whose step of dense CPU parameters is one C call.

    Arguments, `param_groups`, state and errors are torch's. It has none of the options that
    faststep's other optimizers add: `max_grad_norm`, `keep_grads`, `master_weights`. Clip before
    the step.

    The step runs in C for parameters in CPU memory of type float32, float64, bfloat16 or float16,
    in any layout, whose gradient and states have the same type. torch's operators make the step of
    all other parameters (CUDA, DTensors, tensor subclasses, gradients or states of another type,
    states that are not contiguous, parameters that share memory), under a TorchDispatchMode, under
    autocast, and in a compiled step. `foreach` makes no difference in C.
    """

    # A class attribute stands in where pickle and deepcopy restore an optimizer without __init__.
    # The second plan is for what remains of parameters of which torch's operators take some.
    _plans: tuple[_C.Plan, ...] = ()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure (Callable, optional): reevaluates the model and returns the loss.
        """
        loss = None if closure is None else loss_of(closure)
        self._factored_step()
        return loss

    def _factored_step(self) -> None:
        """The step without a closure."""
        if torch.compiler.is_compiling():
            self._step_by_torch(self.param_groups, "in a compiled step")
        elif watcher := watched_by():
            self._step_by_torch(self.param_groups, watcher)
        elif torch.is_autocast_enabled("cpu"):  # where torch's product of row and column rounds
            self._step_by_torch(self.param_groups, "under autocast")
        else:
            for name in ("grad_scale", "found_inf"):  # as torch's: it unscales no gradients
                if getattr(self, name, None) is not None:
                    raise AssertionError("Grad scaling should occur outside of optimizer.step()")
            self._plans = self._plans or (_C.Plan(), _C.Plan())
            lists = (group["params"] for group in self.param_groups)  # or what scripts put there
            params = [some if type(some) is list else list(some) for some in lists]
            self._step_in_c(params, self._plans[0])

    def _step_in_c(self, params: Params, plan: _C.Plan) -> None:
        rules = self._rules()
        what, value = self._called(plan, params, rules)
        if what == "missing":
            self._begin_states(value)
            what, value = self._called(plan, params, rules)
        if what == "missing":
            group, index = value[0]
            if "step" in self.state[params[group][index]]:  # a mapping of a script
                self._step_by_torch(self.param_groups, "a state that is no dict")
                return
            raise self._explained(params, group, index, "state", "key", "has no 'step'")
        if what == "done":
            if written := value[2]:
                increment_version(written)
            return
        self._begin_states(value)  # raises torch's errors before anything is done
        left = {*value}
        rest = [
            [p for at, p in enumerate(of_group) if (index, at) not in left]
            for index, of_group in enumerate(params)
        ]
        torchs = [
            {
                **group,
                "params": [params[index][at] for of, at in sorted(left) if of == index],
                "eps": rules[index][3][2:4],
            }
            for index, group in enumerate(self.param_groups)
        ]
        self._step_by_torch(torchs, _LEFT)
        self._step_in_c(rest, self._plans[1])

    def _rules(self) -> list[Rule]:
        return [_rule_of(group) for group in self.param_groups]

    def _begin_states(self, places: list[tuple[int, int]]) -> None:
        """As torch's step does, of all parameters of these groups."""
        for group in {group for group, _ in places}:
            self._init_group(self.param_groups[group], [], [], [], [], [], [])

    def _called(self, plan: _C.Plan, params: Params, rules: list[Rule]) -> tuple[str, Any]:
        try:
            return plan.step(params, rules, self.state, None, _ON_HOST, 0, math.nan, False, 0)
        except _C.TensorError as error:
            raise self._explained(params, *error.args) from None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for plan in self._plans:  # they would keep small tensors of the old state alive
            plan.forget()

    def _step_by_torch(self, groups: list[dict[str, Any]], reason: str) -> None:
        """The step of torch's class, on these groups. `reason` is what `run` reports."""
        whole = self.param_groups
        if groups is whole:  # torch 2.11 compiles no step that sets an attribute
            inspect.unwrap(torch.optim.Adafactor.step)(self)
            return
        self.param_groups = groups
        try:
            inspect.unwrap(torch.optim.Adafactor.step)(self)
        finally:
            self.param_groups = whole

    def _explained(
        self, params: Params, group: int, index: int, role: str, kind: str, detail: str
    ) -> Exception:
        """The error for a tensor that cannot be used, of the type that torch's has."""
        param = params[group][index]
        at = next(i for i, p in enumerate(self.param_groups[group]["params"]) if p is param)
        where = ("" if role == "parameter" else f"{role} of ") + described(self, group, at)
        text = f"{where} {detail}; nothing was updated"
        if kind == "empty":  # torch divides by the root of the count
            return ZeroDivisionError(f"float division by zero: {text}")
        if kind == "key" and detail != "has no 'step'":
            what = "variance" if "variance" in detail else "row_var and col_var"
            when = "a vector" if what == "variance" else "multidimensional"
            return AssertionError(f"{what} should be defined when grad is {when}: {text}")
        return (KeyError if kind == "key" else RuntimeError)(f"{type(self).__name__}: {text}")
