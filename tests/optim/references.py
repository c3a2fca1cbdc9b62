"""One step of each optimizer in fp64, written from the papers and from torch's documentation.

Every function takes and returns fp64 tensors and allocates freely: it is meant to be read, not
to be fast.  `state` is a dict that is empty before the first step.  `h` holds the
hyper-parameters of the group under torch's names.
"""

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


def adagrad(p: Tensor, g: Tensor, state: State, h: dict[str, Any]) -> tuple[Tensor, State]:
    """Adagrad as torch documents it: the learning rate decays by the step."""
    lr, wd, eps = float(h["lr"]), float(h["weight_decay"]), float(h["eps"])
    t = float(state.get("step", 0.0)) + 1.0
    if h["maximize"]:
        g = -g
    g = g + wd * p
    total = state.get("sum", torch.full_like(p, h["initial_accumulator_value"])) + g * g
    rate = lr / (1.0 + (t - 1.0) * h["lr_decay"])
    return p - rate * g / (total.sqrt() + eps), {"step": t, "sum": total}


def rmsprop(p: Tensor, g: Tensor, state: State, h: dict[str, Any]) -> tuple[Tensor, State]:
    """RMSprop, centered or not, with momentum or without."""
    lr, wd, eps, alpha = (float(h[key]) for key in ("lr", "weight_decay", "eps", "alpha"))
    zero = torch.zeros_like(p)
    new: State = {"step": float(state.get("step", 0.0)) + 1.0}
    if h["maximize"]:
        g = -g
    g = g + wd * p
    variance = new["square_avg"] = alpha * state.get("square_avg", zero) + (1.0 - alpha) * g * g
    if h["centered"]:
        new["grad_avg"] = alpha * state.get("grad_avg", zero) + (1.0 - alpha) * g
        variance = (variance - new["grad_avg"] ** 2).abs()
    update = g / (variance.sqrt() + eps)
    if h["momentum"] > 0:
        update = h["momentum"] * state.get("momentum_buffer", zero) + update
        new["momentum_buffer"] = update
    return p - lr * update, new


def adamax(p: Tensor, g: Tensor, state: State, h: dict[str, Any]) -> tuple[Tensor, State]:
    """Adamax (Kingma & Ba 2015, algorithm 2), with eps where torch has it."""
    beta1, beta2 = (float(beta) for beta in h["betas"])
    lr, wd, eps = float(h["lr"]), float(h["weight_decay"]), float(h["eps"])
    zero = torch.zeros_like(p)
    t = float(state.get("step", 0.0)) + 1.0
    if h["maximize"]:
        g = -g
    g = g + wd * p
    m = beta1 * state.get("exp_avg", zero) + (1.0 - beta1) * g
    u = torch.maximum(beta2 * state.get("exp_inf", zero), g.abs() + eps)
    return p - lr / (1.0 - beta1**t) * m / u, {"step": t, "exp_avg": m, "exp_inf": u}


def adadelta(p: Tensor, g: Tensor, state: State, h: dict[str, Any]) -> tuple[Tensor, State]:
    """Adadelta (Zeiler 2012, algorithm 1), the update times a learning rate."""
    lr, wd, eps, rho = (float(h[key]) for key in ("lr", "weight_decay", "eps", "rho"))
    zero = torch.zeros_like(p)
    if h["maximize"]:
        g = -g
    g = g + wd * p
    squares = rho * state.get("square_avg", zero) + (1.0 - rho) * g * g
    before = state.get("acc_delta", zero)
    delta = (before + eps).sqrt() / (squares + eps).sqrt() * g
    deltas = rho * before + (1.0 - rho) * delta * delta
    t = float(state.get("step", 0.0)) + 1.0
    return p - lr * delta, {"step": t, "square_avg": squares, "acc_delta": deltas}


def radam(p: Tensor, g: Tensor, state: State, h: dict[str, Any]) -> tuple[Tensor, State]:
    """RAdam (Liu et al. 2020, algorithm 2); weight decay is L2 or decoupled."""
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
    m_hat = m / (1.0 - beta1**t)
    longest = 2.0 / (1.0 - beta2) - 1.0
    length = longest - 2.0 * t * beta2**t / (1.0 - beta2**t)
    if length <= 5.0:
        return p - lr * m_hat, new
    above, below = (length - 4.0) * (length - 2.0), (longest - 4.0) * (longest - 2.0)
    factor = math.sqrt(above * longest / (below * length))
    return p - lr * factor * m_hat * math.sqrt(1.0 - beta2**t) / (v.sqrt() + eps), new


def rprop(p: Tensor, g: Tensor, state: State, h: dict[str, Any]) -> tuple[Tensor, State]:
    """Rprop (Riedmiller & Braun 1993) without weight backtracking, as torch documents it."""
    minus, plus = h["etas"]
    if h["maximize"]:
        g = -g
    size = state.get("step_size", torch.full_like(p, float(h["lr"])))
    turned = (g * state.get("prev", torch.zeros_like(p))).sign()
    size = torch.where(turned > 0, size * plus, torch.where(turned < 0, size * minus, size))
    size = size.clamp(*h["step_sizes"])
    g = torch.where(turned < 0, 0.0, g)
    t = float(state.get("step", 0.0)) + 1.0
    return p - size * g.sign(), {"step": t, "prev": g, "step_size": size}


def nadam(p: Tensor, g: Tensor, state: State, h: dict[str, Any]) -> tuple[Tensor, State]:
    """NAdam (Dozat 2016) as torch documents it; the product of all mu is held in fp32."""
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
    mu, mu_next = (beta1 * (1.0 - 0.5 * 0.96 ** (n * h["momentum_decay"])) for n in (t, t + 1.0))
    product = float(torch.tensor(float(state.get("mu_product", 1.0)), dtype=torch.float32) * mu)
    m = beta1 * state.get("exp_avg", zero) + (1.0 - beta1) * g
    v = beta2 * state.get("exp_avg_sq", zero) + (1.0 - beta2) * g * g
    m_hat = mu_next * m / (1.0 - product * mu_next) + (1.0 - mu) * g / (1.0 - product)
    v_hat = v / (1.0 - beta2**t)
    new: State = {"step": t, "mu_product": product, "exp_avg": m, "exp_avg_sq": v}
    return p - lr * m_hat / (v_hat.sqrt() + eps), new


def asgd(p: Tensor, g: Tensor, state: State, h: dict[str, Any]) -> tuple[Tensor, State]:
    """ASGD (Polyak & Juditsky 1992) as torch does it; eta and mu are held in fp32."""
    lr, lambd = float(h["lr"]), float(h["lambd"])
    if h["maximize"]:
        g = -g
    g = g + float(h["weight_decay"]) * p
    eta = float(state.get("eta", torch.tensor(lr, dtype=torch.float32)))
    mu = float(state.get("mu", 1.0))
    p = p * (1.0 - lambd * eta) - eta * g
    ax = state.get("ax", torch.zeros_like(p))
    t = float(state.get("step", 0.0)) + 1.0
    new: State = {"step": t, "ax": ax + mu * (p - ax)}
    later = lr / (1.0 + lambd * lr * t) ** h["alpha"], 1.0 / max(1.0, t - h["t0"])
    new["eta"], new["mu"] = torch.tensor(later, dtype=torch.float32).tolist()
    return p, new


def total_norm(grads: list[Tensor]) -> float:
    """Global 2-norm with a correctly rounded sum: no order of additions to agree on."""
    squares = [g.detach().double().square().flatten() for g in grads]
    return math.sqrt(math.fsum(torch.cat(squares).tolist()))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """torch.nn.utils.clip_grads_with_norm_'s coefficient."""
    return min(1.0, max_norm / (norm + 1e-6))
