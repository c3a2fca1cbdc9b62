"""One step of each optimizer in fp64, written from the papers and from torch's documentation.

Every function takes and returns fp64 tensors and allocates freely: it is meant to be read, not
to be fast.  `state` is a dict that is empty before the first step.  `h` holds the
hyper-parameters of the group under torch's names.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


def adam(p: Tensor, g: Tensor, state: State, h: dict[str, Any]) -> tuple[Tensor, State]:
    """Adam, AdamW (h["decoupled_weight_decay"]) and their AMSGrad forms."""
    beta1, beta2 = (float(beta) for beta in h["betas"])
    lr, wd, eps = float(h["lr"]), float(h["weight_decay"]), float(h["eps"])
    zero = torch.zeros_like(p)
    t = float(state.get("step", 0.0)) + 1.0
    if h["maximize"]:
        g = -g
    if h["decoupled_weight_decay"]:
        p = p - lr * wd * p
    else:
        g = g + wd * p
    m = beta1 * state.get("exp_avg", zero) + (1.0 - beta1) * g
    v = beta2 * state.get("exp_avg_sq", zero) + (1.0 - beta2) * g * g
    new: State = {"step": t, "exp_avg": m, "exp_avg_sq": v}
    largest = v
    if h["amsgrad"]:
        largest = torch.maximum(state.get("max_exp_avg_sq", zero), v)
        new["max_exp_avg_sq"] = largest
    m_hat = m / (1.0 - beta1**t)
    v_hat = largest / (1.0 - beta2**t)
    return p - lr * m_hat / (v_hat.sqrt() + eps), new


def sgd(p: Tensor, g: Tensor, state: State, h: dict[str, Any]) -> tuple[Tensor, State]:
    """SGD with momentum as torch documents it: the first buffer is the undamped gradient."""
    lr, wd, momentum = float(h["lr"]), float(h["weight_decay"]), float(h["momentum"])
    if h["maximize"]:
        g = -g
    g = g + wd * p
    if momentum == 0.0:
        return p - lr * g, {}
    if state.get("momentum_buffer") is None:
        buffer = g
    else:
        buffer = momentum * state["momentum_buffer"] + (1.0 - h["dampening"]) * g
    update = g + momentum * buffer if h["nesterov"] else buffer
    return p - lr * update, {"momentum_buffer": buffer}


def lion(p: Tensor, g: Tensor, state: State, h: dict[str, Any]) -> tuple[Tensor, State]:
    """Lion (Chen et al. 2023, algorithm 2), weight decay decoupled."""
    beta1, beta2 = (float(beta) for beta in h["betas"])
    lr, wd = float(h["lr"]), float(h["weight_decay"])
    if h["maximize"]:
        g = -g
    m = state.get("exp_avg", torch.zeros_like(p))
    mixed = beta1 * m + (1.0 - beta1) * g
    direction = torch.where(mixed.isnan(), mixed, mixed.sign())  # torch.sign(NaN) is 0
    return p - lr * wd * p - lr * direction, {"exp_avg": beta2 * m + (1.0 - beta2) * g}


def total_norm(grads: list[Tensor]) -> float:
    """Global 2-norm with a correctly rounded sum: no order of additions to agree on."""
    squares = [g.detach().double().square().flatten() for g in grads]
    return math.sqrt(math.fsum(torch.cat(squares).tolist()))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """torch.nn.utils.clip_grads_with_norm_'s coefficient."""
    return min(1.0, max_norm / (norm + 1e-6))
