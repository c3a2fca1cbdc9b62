"""Adagrad."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import Rule
from .counted import CountedOptimizer
from .masters import begin_state, has_master, with_master

__all__ = ["Adagrad"]


class Adagrad(CountedOptimizer, torch.optim.Adagrad):
    """:class:`torch.optim.Adagrad` (Duchi, Hazan & Singer 2011) with a step that is one C call.

    Same arguments, defaults, `param_groups`, `state` and errors. `foreach` changes nothing, and
    `fused=True` only that torch.amp.GradScaler leaves unscaling to the step, as in torch.
    Parameters: CPU or CUDA tensors in float32, float64, bfloat16 or float16.

    Args:
        params (iterable): as for torch.
        lr (float or Tensor): learning rate. Default: 1e-2.
        lr_decay (float): the learning rate is divided by 1 + (step - 1) * lr_decay. Default: 0.
        weight_decay (float): L2 penalty. Default: 0.
        initial_accumulator_value (float): what the sum of squares begins with. Default: 0.
        eps (float): added to the denominator. Default: 1e-10.
        maximize, foreach, differentiable, fused: as for torch.
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
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
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
            lr_decay,
            weight_decay,
            initial_accumulator_value,
            eps,
            foreach,
            maximize=maximize,
            differentiable=differentiable,
            fused=fused,
        )
        if self._keeps_masters:  # torch has made the states, in the parameters' types
            for group in self.param_groups:
                for param in filter(has_master, group["params"]):
                    del self.state[param]
                    begin_state(self, group, with_master(self._rule_of(group)), param)

    def _keys_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("step", "sum")

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        return self._counted_rule(
            "adagrad", group, group["lr_decay"], group["weight_decay"], group["eps"]
        )

    def _new_tensor(self, group: dict[str, Any], param: Tensor, key: str) -> Tensor:
        new = super()._new_tensor(group, param, key)
        value = self.defaults["initial_accumulator_value"]  # torch does not ask the group either
        return new.fill_(value) if value != 0 else new

    def _update_by_torch(self) -> None:
        for group in self.param_groups:  # before torch's loop has written the first parameter
            grads = (p.grad for p in group["params"] if p.grad is not None)
            if group["weight_decay"] != 0 and any(grad.is_sparse for grad in grads):
                raise RuntimeError("weight_decay option is not compatible with sparse gradients")
        super()._update_by_torch()
