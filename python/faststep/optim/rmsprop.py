"""RMSprop."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import Rule
from .counted import CountedOptimizer

__all__ = ["RMSprop"]


class RMSprop(CountedOptimizer, torch.optim.RMSprop):
    """:class:`torch.optim.RMSprop` with a step that is one C call.

    Same arguments, defaults, `param_groups`, `state` and errors. `foreach` changes nothing.
    Parameters: dense CPU or CUDA tensors in float32, float64, bfloat16 or float16.

    Args:
        params (iterable): as for torch.
        lr (float or Tensor): learning rate. Default: 1e-2.
        alpha (float): decay of the average of squares. Default: 0.99.
        eps (float): added to the denominator. Default: 1e-8.
        weight_decay (float): L2 penalty. Default: 0.
        momentum (float): decay of the momentum buffer. Default: 0, no buffer.
        centered (bool): divide by an estimate of the standard deviation. Default: False.
        capturable, foreach, maximize, differentiable: as for torch.
        max_grad_norm (float, optional): clip all gradients by their global 2-norm inside the
            step. Default: None.
        keep_grads (bool): with `max_grad_norm`, write unscaled and clipped gradients back.
            Default: False.
        master_weights (bool or "fp32"): keep fp32 masters, and fp32 states, of bfloat16 and float16
            parameters. True is "fp32". Default: False.
    """

    _keys: ClassVar = {  # by whether there is momentum, and whether it is centered
        (False, False): ("step", "square_avg"),
        (True, False): ("step", "square_avg", "momentum_buffer"),
        (False, True): ("step", "square_avg", "grad_avg"),
        (True, True): ("step", "square_avg", "momentum_buffer", "grad_avg"),
    }
    _names: ClassVar = {
        (False, False): "rmsprop",
        (True, False): "rmsprop_momentum",
        (False, True): "rmsprop_centered",
        (True, True): "rmsprop_centered_momentum",
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        max_grad_norm: float | None = None,
        keep_grads: bool = False,
        master_weights: bool | Literal["fp32"] = False,
    ) -> None:
        self._set_options(max_grad_norm, keep_grads, master_weights)
        super().__init__(
            params,
            lr,
            alpha,
            eps,
            weight_decay,
            momentum,
            centered,
            capturable,
            foreach,
            maximize,
            differentiable,
        )

    def _keys_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._keys[group["momentum"] > 0, bool(group["centered"])]

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        return self._counted_rule(
            self._names[group["momentum"] > 0, bool(group["centered"])],
            group,
            group["alpha"],
            group["eps"],
            group["weight_decay"],
            group["momentum"],
        )
