"""Adamax."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import Rule, number
from .counted import CountedOptimizer

__all__ = ["Adamax"]


class Adamax(CountedOptimizer, torch.optim.Adamax):
    """:class:`torch.optim.Adamax` (Kingma & Ba 2015, arXiv:1412.6980) with a step that is
    one C call.

    Same arguments, defaults, `param_groups`, `state` and errors. `foreach` changes nothing.
    Parameters: dense CPU or CUDA tensors in float32, float64, bfloat16 or float16.

    Args:
        params (iterable): as for torch.
        lr (float or Tensor): learning rate. Default: 2e-3.
        betas (tuple of two floats): decay of the first moment and of the infinity norm.
            Default: (0.9, 0.999).
        eps (float): added to the size of a gradient. Default: 1e-8.
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
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        max_grad_norm: float | None = None,
        keep_grads: bool = False,
        master_weights: bool | Literal["fp32"] = False,
    ) -> None:
        self._set_options(max_grad_norm, keep_grads, master_weights)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            foreach,
            maximize=maximize,
            differentiable=differentiable,
            capturable=capturable,
        )

    def _keys_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("step", "exp_avg", "exp_inf")

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        beta1, beta2 = group["betas"]
        return self._counted_rule(
            "adamax", group, number(beta1), number(beta2), group["eps"], group["weight_decay"]
        )
