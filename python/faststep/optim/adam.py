"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import Rule, number
from .counted import CountedOptimizer

__all__ = ["Adam", "AdamW"]


class _AdamStep(CountedOptimizer):
    _keys = ("step", "exp_avg", "exp_avg_sq")
    _amsgrad_keys = (*_keys, "max_exp_avg_sq")

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        beta1, beta2 = group["betas"]
        return self._counted_rule(
            "amsgrad" if group["amsgrad"] else "adam",
            group,
            number(beta1),
            number(beta2),
            group["eps"],
            group["weight_decay"],
            group["decoupled_weight_decay"],
        )

    def _keys_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._amsgrad_keys if group["amsgrad"] else self._keys


class Adam(_AdamStep, torch.optim.Adam):
    """:class:`torch.optim.Adam` (Kingma & Ba 2015, arXiv:1412.6980) with a step that is one C call.

    Same arguments, defaults, `param_groups`, `state` and errors. `foreach` changes nothing, and
    `fused=True` only that torch.amp.GradScaler leaves unscaling to the step, as in torch.
    Parameters: CPU or CUDA tensors in float32, float64, bfloat16 or float16; a CUDA step is two
    kernel launches for any number of tensors.

    Args:
        params (iterable): as for torch.
        lr (float or Tensor): learning rate. Default: 1e-3.
        betas (tuple of two floats): decay of the first and the second moment.
            Default: (0.9, 0.999).
        eps (float): added to the denominator. Default: 1e-8.
        weight_decay (float): L2 penalty, or decoupled decay with `decoupled_weight_decay`.
            Default: 0.
        amsgrad (bool): keep the largest second moment (Reddi et al. 2018). Default: False.
        maximize, foreach, capturable, differentiable, fused, decoupled_weight_decay: as for torch.
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
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
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
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )


class AdamW(_AdamStep, torch.optim.AdamW):
    """:class:`torch.optim.AdamW` with a step that is one C call.

    As :class:`Adam`, with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101),
    1e-2 by default.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
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
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
