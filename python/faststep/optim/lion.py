"""Lion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .arguments import composed
from .base import FusedOptimizer, number
from .request import formula


@composed
class Lion(FusedOptimizer):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675).

    ``p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)``, then
    ``m = beta2 * m + (1 - beta2) * g``. Parameters: dense CPU or CUDA tensors in float32, float64,
    bfloat16 or float16. State: `exp_avg`, of the parameter's shape, dtype and layout. ValueError
    for a hyper-parameter out of range.

    Args:
        lr (float or Tensor): learning rate, 3 to 10 times smaller than AdamW's.
        betas (tuple of two floats): weights of the momentum in the update and in its own decay.
        weight_decay (float): decoupled.
    """

    _formula = formula("lion", "exp_avg")
    _code_dtypes: ClassVar[Mapping[str, torch.dtype]] = {"exp_avg": torch.int8}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        keep_grads: bool = False,
        master_weights: bool | Literal["fp32", "remainder16"] = False,
        state_dtype: Literal["fp32", "bf16", "int8"] | None = None,
        min_8bit_size: int = 4096,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        rounding_seed: int = 0,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if not lr >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        for index in (0, 1):
            if not 0.0 <= betas[index] < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {betas[index]}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params,
            defaults,
            max_grad_norm=max_grad_norm,
            keep_grads=keep_grads,
            master_weights=master_weights,
            state_dtype=state_dtype,
            min_8bit_size=min_8bit_size,
            rounding=rounding,
            rounding_seed=rounding_seed,
        )

    def _update_by_torch(self) -> None:
        """torch has no Lion: the formula, operator by operator."""
        for group in self.param_groups:
            beta1, beta2 = map(number, group["betas"])
            lr = number(group["lr"])
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = -param.grad if group["maximize"] else param.grad
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                exp_avg = state["exp_avg"]
                param.mul_(1.0 - lr * group["weight_decay"])
                param.add_(torch.sign(exp_avg * beta1 + grad * (1.0 - beta1)), alpha=-lr)
                exp_avg.lerp_(grad, 1.0 - beta2)
