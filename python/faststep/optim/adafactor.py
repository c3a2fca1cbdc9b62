"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) with torch's class, arguments and state."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._torch.modes import is_watched
from .._torch.optim import increment_version
from ..grads.params import described
from .hooked import HookedOptimizer
from .step import loss_of

__all__ = ["Adafactor"]

_LEFT = "parameters that are not dense CPU tensors of one dtype, as their gradients and states are"
Group = tuple[list[Tensor], float, float, float, float, float, float, bool]


def _numbers(group: dict[str, Any], params: list[Tensor]) -> Group:
    """The numbers that the step of a group computes with, for the parameters in `params`."""
    lr = group["lr"]
    eps1, eps2 = group["eps"]
    if eps1 is None:  # as torch with foreach=False: that of the first parameter, for all
        every = group["params"]
        first = next((p for p in every if p.grad is not None), None)
        eps1 = 0.0 if first is None or first.is_complex() else torch.finfo(first.dtype).eps
    return (
        params,
        float(lr.item() if isinstance(lr, Tensor) else lr),
        group["beta2_decay"],
        eps1,
        eps2,
        group["d"],
        group["weight_decay"],
        group["maximize"],
    )


class Adafactor(HookedOptimizer, torch.optim.Adafactor):
    """torch.optim.Adafactor, whose step of dense CPU parameters is one C call.

    Arguments, `param_groups`, state and errors are torch's. It has none of the options that
    faststep's other optimizers add: `max_grad_norm`, `keep_grads`, `master_weights`. Clip before
    the step.

    The step runs in C for parameters in CPU memory of type float32, float64, bfloat16 or float16,
    in any layout, whose gradient and states have the same type. torch's operators make the step of
    all other parameters (CUDA, DTensors, tensor subclasses, gradients or states of another type,
    states that are not contiguous, parameters that share memory), under a TorchDispatchMode, and in
    a compiled step. `foreach` makes no difference in C.
    """

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
        elif is_watched():
            self._step_by_torch(self.param_groups, "in a TorchDispatchMode")
        else:
            self._refuse_scaler()
            self._step_in_c([self._listed(group) for group in self.param_groups])

    @staticmethod
    def _listed(group: dict[str, Any]) -> list[Tensor]:
        """A group's parameters, which scripts may have replaced by those in another container."""
        params: list[Tensor] = group["params"]
        return params if type(params) is list else list(params)

    def _refuse_scaler(self) -> None:
        """As torch's: it unscales no gradients."""
        for name in ("grad_scale", "found_inf"):
            if getattr(self, name, None) is not None:
                raise AssertionError("Grad scaling should occur outside of optimizer.step()")

    def _step_in_c(self, params: list[list[Tensor]]) -> None:
        groups = tuple(map(_numbers, self.param_groups, params))
        missing, left, written = self._called(groups)
        if missing:
            for index in missing:
                self._init_group(self.param_groups[index], [], [], [], [], [], [])
            missing, left, written = self._called(groups)
        if not left:
            if written:
                increment_version(written)
            return
        for index in {group for group, _ in left}:  # raises torch's errors before anything is done
            self._init_group(self.param_groups[index], [], [], [], [], [], [])
        places = {*left}
        rest = [
            [p for at, p in enumerate(of_group) if (index, at) not in places]
            for index, of_group in enumerate(params)
        ]
        torchs = [
            {
                **group,
                "params": [params[index][at] for of, at in left if of == index],
                "eps": (groups[index][3], groups[index][4]),
            }
            for index, group in enumerate(self.param_groups)
        ]
        self._step_by_torch(torchs, _LEFT)
        self._step_in_c(rest)

    def _called(
        self, groups: tuple[Group, ...]
    ) -> tuple[list[int], list[tuple[int, int]], list[Tensor]]:
        try:
            return _C.factored_step(groups, self.state)
        except _C.TensorError as error:
            raise self._explained(groups, *error.args) from None

    def _step_by_torch(self, groups: list[dict[str, Any]], reason: str) -> None:
        """The step of torch's class, on these groups. `reason` is what `run` reports."""
        whole = self.param_groups
        self.param_groups = groups
        try:
            inspect.unwrap(torch.optim.Adafactor.step)(self)
        finally:
            self.param_groups = whole

    def _explained(
        self, groups: tuple[Group, ...], group: int, index: int, role: str, kind: str, detail: str
    ) -> Exception:
        """The error for a tensor that cannot be used, of the type that torch's has."""
        param = groups[group][0][index]
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
