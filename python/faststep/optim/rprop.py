"""Rprop."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import Rule, number
from .counted import CountedOptimizer

__all__ = ["Rprop"]


class Rprop(CountedOptimizer, torch.optim.Rprop):
    """:class:`torch.optim.Rprop` (Riedmiller & Braun 1993) with a step that is one C call.

    Same arguments, defaults, `param_groups`, `state` and errors. `foreach` changes nothing.
    Parameters: dense CPU or CUDA tensors in float32, float64, bfloat16 or float16. The sign of the
    product of two gradients is exact. torch's product underflows in float16, at gradients of about
    1e-4: then its step sizes stay, and ours change.

    Args:
        params (iterable): as for torch.
        lr (float or Tensor): the first step size of every element. Default: 1e-2.
        etas (tuple of two floats): a step size is multiplied by the first where the gradient's sign
            has turned, and by the second where it has not. Default: (0.5, 1.2).
        step_sizes (tuple of two floats): the smallest and the largest one. Default: (1e-6, 50).
        maximize, foreach, capturable, differentiable: as for torch.
        max_grad_norm (float, optional): clip all gradients by their global 2-norm inside the
            step. Default: None.
        keep_grads (bool): with `max_grad_norm`, write unscaled and clipped gradients back.
            Default: False.
        master_weights (bool or "fp32"): keep fp32 masters, and fp32 states, of bfloat16 and float16
            parameters. True is "fp32". Default: False.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50),
        *,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        max_grad_norm: float | None = None,
        keep_grads: bool = False,
        master_weights: bool | Literal["fp32"] = False,
    ) -> None:
        self._set_options(max_grad_norm, keep_grads, master_weights)
        super().__init__(
            params,
            lr,
            etas,
            step_sizes,
            capturable=capturable,
            foreach=foreach,
            maximize=maximize,
            differentiable=differentiable,
        )

    def _keys_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("step", "prev", "step_size")

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        minus, plus = group["etas"]
        smallest, largest = group["step_sizes"]
        return self._counted_rule("rprop", group, minus, plus, smallest, largest)

    def _new_tensor(self, group: dict[str, Any], param: Tensor, key: str) -> Tensor:
        new = super()._new_tensor(group, param, key)
        return new.fill_(number(group["lr"])) if key == "step_size" else new

    def _drop_new_state(self, param: Tensor) -> None:
        """A learning rate that changes before the first step that happens counts."""
        self._drop_unstepped(param)

    def _zeros_differ(self, group: dict[str, Any]) -> bool:
        return True
