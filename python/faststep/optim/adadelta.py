"""Adadelta."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import Rule
from .counted import CountedOptimizer

__all__ = ["Adadelta"]


class Adadelta(CountedOptimizer, torch.optim.Adadelta):
    """:class:`torch.optim.Adadelta` (Zeiler 2012, arXiv:1212.5701) with a step that is one C call.

    Same arguments, defaults, `param_groups`, `state` and errors. `foreach` changes nothing.
    Parameters: dense CPU or CUDA tensors in float32, float64, bfloat16 or float16.

    Args:
        params (iterable): as for torch.
        lr (float or Tensor): what the update is multiplied by. Default: 1.0.
        rho (float): decay of both averages of squares. Default: 0.9.
        eps (float): added to both averages. Default: 1e-6.
        weight_decay (float): L2 penalty. Default: 0.
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
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
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
            rho,
            eps,
            weight_decay,
            foreach,
            capturable=capturable,
            maximize=maximize,
            differentiable=differentiable,
        )

    def _keys_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("step", "square_avg", "acc_delta")

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        return self._counted_rule(
            "adadelta", group, group["rho"], group["eps"], group["weight_decay"]
        )
