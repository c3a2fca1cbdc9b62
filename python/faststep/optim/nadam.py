"""NAdam."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import Rule, number
from .counted import CountedOptimizer

__all__ = ["NAdam"]


class NAdam(CountedOptimizer, torch.optim.NAdam):
    """:class:`torch.optim.NAdam` (Dozat 2016) with a step that is one C call.

    Same arguments, defaults, `param_groups`, `state` and errors. `foreach` changes nothing.
    Parameters: dense CPU or CUDA tensors in float32, float64, bfloat16 or float16.

    Args:
        params (iterable): as for torch.
        lr (float or Tensor): learning rate. Default: 2e-3.
        betas (tuple of two floats): decay of the first and the second moment.
            Default: (0.9, 0.999).
        eps (float): added to the denominator. Default: 1e-8.
        weight_decay (float): L2 penalty, or decoupled decay with `decoupled_weight_decay`.
            Default: 0.
        momentum_decay (float): how fast the coefficient of the momentum grows. Default: 4e-3.
        decoupled_weight_decay (bool): as in AdamW. Default: False.
        maximize, foreach, capturable, differentiable: as for torch.
        max_grad_norm (float, optional): clip all gradients by their global 2-norm inside the
            step. Default: None.
        keep_grads (bool): with `max_grad_norm`, write unscaled and clipped gradients back.
            Default: False.
        master_weights (bool or "fp32"): keep fp32 masters, and fp32 states, of bfloat16 and float16
            parameters. True is "fp32". Default: False.
    """

    _numbers = ("mu_product",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
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
            momentum_decay,
            decoupled_weight_decay,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
        )

    def _keys_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("step", "mu_product", "exp_avg", "exp_avg_sq")

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        beta1, beta2 = group["betas"]
        return self._counted_rule(
            "nadam",
            group,
            number(beta1),
            number(beta2),
            group["eps"],
            group["weight_decay"],
            group["decoupled_weight_decay"],
            group["momentum_decay"],
        )

    def _first_number(self, group: dict[str, Any], key: str) -> float:
        return 1.0
