"""ASGD."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import Rule, number
from .counted import CountedOptimizer

__all__ = ["ASGD"]


class ASGD(CountedOptimizer, torch.optim.ASGD):
    """:class:`torch.optim.ASGD` (Polyak & Juditsky 1992) with a step that is one C call.

    Same arguments, defaults, `param_groups`, `state` and errors. `foreach` changes nothing.
    Parameters: dense CPU or CUDA tensors in float32, float64, bfloat16 or float16. The average of
    a parameter is `state[param]["ax"]`.

    Args:
        params (iterable): as for torch.
        lr (float or Tensor): learning rate. Default: 1e-2.
        lambd (float): decay of the parameter and of the learning rate. Default: 1e-4.
        alpha (float): power of the decay of the learning rate. Default: 0.75.
        t0 (float): step at which averaging starts. Default: 1e6.
        weight_decay (float): L2 penalty. Default: 0.
        maximize, foreach, capturable, differentiable: as for torch.
        max_grad_norm (float, optional): clip all gradients by their global 2-norm inside the
            step. Default: None.
        keep_grads (bool): with `max_grad_norm`, write unscaled and clipped gradients back.
            Default: False.
        master_weights (bool or "fp32"): keep fp32 masters, and fp32 states, of bfloat16 and float16
            parameters. True is "fp32". Default: False.
    """

    _numbers = ("eta", "mu")
    _counts_on_device = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        *,
        max_grad_norm: float | None = None,
        keep_grads: bool = False,
        master_weights: bool | Literal["fp32"] = False,
    ) -> None:
        self._set_options(max_grad_norm, keep_grads, master_weights)
        super().__init__(
            params,
            lr,
            lambd,
            alpha,
            t0,
            weight_decay,
            foreach,
            maximize,
            differentiable,
            capturable,
        )

    def _keys_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("step", "eta", "mu", "ax")

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        return self._counted_rule(
            "asgd",
            group,
            group["lambd"],
            group["alpha"],
            group["t0"],
            group["weight_decay"],
        )

    def _first_number(self, group: dict[str, Any], key: str) -> float:
        return number(group["lr"]) if key == "eta" else 1.0

    def _drop_new_state(self, param: Tensor) -> None:
        """A learning rate that changes before the first step that happens counts."""
        self._drop_unstepped(param)

    def _zeros_differ(self, group: dict[str, Any]) -> bool:
        return True
