"""SGD."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import FusedOptimizer, Rule, number

__all__ = ["SGD"]


class SGD(FusedOptimizer, torch.optim.SGD):
    """:class:`torch.optim.SGD` with a step that is one C call.

    Same arguments, defaults, `param_groups`, `state` and errors. `foreach` changes nothing, and
    `fused=True` only that torch.amp.GradScaler leaves unscaling to the step, as in torch.
    Parameters: CPU or CUDA tensors in float32, float64, bfloat16 or float16; a CUDA step is two
    kernel launches for any number of tensors.

    Args:
        params (iterable): as for torch.
        lr (float or Tensor): learning rate. Default: 1e-3.
        momentum (float): decay of the momentum buffer. Default: 0, no buffer.
        dampening (float): the gradient enters the buffer times 1 - dampening, except for the
            first time. Default: 0.
        weight_decay (float or Tensor): L2 penalty. Default: 0.
        nesterov (bool): Nesterov's look-ahead (Sutskever et al. 2013). Default: False.
        maximize, foreach, differentiable, fused: as for torch.
        max_grad_norm (float, optional): clip all gradients by their global 2-norm inside the
            step. Default: None.
        keep_grads (bool): with `max_grad_norm`, write unscaled and clipped gradients back.
            Default: False.
        master_weights (bool or "fp32"): keep fp32 masters, and fp32 states, of bfloat16 and float16
            parameters. True is "fp32". Default: False.
    """

    _begins_in_parts = True  # torch looks for the buffer alone

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
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
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        momentum = group["momentum"]
        lr, lr_on_device = self._lr_of(group)
        return Rule(
            self._number_of["momentum" if momentum else "sgd"],
            ("momentum_buffer",) if momentum else (),
            False,
            (
                lr,
                momentum,
                group["dampening"],
                number(group["weight_decay"]),
                group["nesterov"],
            ),
            bool(group["maximize"]),
            lr_on_device,
        )

    def _new_state(self, group: dict[str, Any], param: Tensor) -> None:
        self.state[param]["momentum_buffer"] = self._zeros.like(param)

    def _drop_new_state(self, param: Tensor) -> None:
        self.state[param].pop("momentum_buffer", None)  # not there if memory ran out before

    def _is_for_torch(self, group: int, index: int, *what: str) -> bool:
        state = self.state.get(self.param_groups[group]["params"][index], {})
        made_of_sparse = getattr(state.get("momentum_buffer"), "is_sparse", False)
        return made_of_sparse or super()._is_for_torch(group, index, *what)

    def _update_by_torch(self) -> None:
        for group in self.param_groups:  # before torch's loop has written the first parameter
            for param in group["params"]:
                if param.grad is not None:
                    buffer = self.state.get(param, {}).get("momentum_buffer")
                    _refuse_sums(group, param, param.grad, buffer)
        super()._update_by_torch()

    def _zeros_differ(self, group: dict[str, Any]) -> bool:
        return bool(group["dampening"] != 0)


def _refuse_sums(group: dict[str, Any], param: Tensor, grad: Tensor, buffer: Tensor | None) -> None:
    """Raise torch's error for a sum of its step that begins with a sparse tensor."""
    sums = [(grad, param)] if group["weight_decay"] != 0 else []
    if group["momentum"] != 0 and buffer is not None:
        sums += [(buffer, grad), (grad, buffer)] if group["nesterov"] else [(buffer, grad)]
    for one, other in sums:
        if one.is_sparse and not other.is_sparse:
            one.add(other)
