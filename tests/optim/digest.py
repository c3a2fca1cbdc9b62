"""Trains with every rule in every dtype and prints one hash per run: for comparing processes.

    python digest.py [threads]

prints the instruction set in use, then lines of `optimizer options dtype sha256`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

import faststep

RUNS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("Adam", {"weight_decay": 0.1, "eps": 1e-4}),
    ("Adam", {"amsgrad": True, "betas": (0.5, 0.7)}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.2, "maximize": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Lion", {"weight_decay": 0.1}),
    ("Adagrad", {"weight_decay": 0.1, "lr_decay": 0.1}),
    ("RMSprop", {"lr": 1e-3, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    ("Adamax", {"weight_decay": 0.1}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("RAdam", {"weight_decay": 0.1, "betas": (0.9, 0.5)}),
    ("Rprop", {}),
    ("NAdam", {"weight_decay": 0.1}),
    ("ASGD", {"weight_decay": 0.1, "t0": 0.0}),
    ("AdamW", {"amsgrad": True, "betas": (0.9, 0.99), "state_dtype": "int8", "min_8bit_size": 1}),
    ("SGD", {"momentum": 0.9, "state_dtype": "int8", "min_8bit_size": 1}),
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (40_001, 3, 1, 513, 16_384, 0, 31)


@functools.cache
def values(seed: int) -> list[torch.Tensor]:
    """Sizes with all kinds of tails, a transposed matrix, and values of every magnitude."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [*((size,) for size in SIZES), (130, 257), (61, 47)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    drawn[3] *= 1e-30
    drawn[4][::7] *= 1e-6
    drawn[-1] = drawn[-1].t()
    return drawn


def train(name: str, options: dict[str, Any], dtype: torch.dtype) -> str:
    """Three steps: plain, with a scale and clipping, plain."""
    params = [torch.nn.Parameter(value.to(dtype, copy=True)) for value in values(0)]
    optimizer = getattr(faststep.optim, name)(params, **options)
    digest = hashlib.sha256()
    for step in range(3):
        for p, g in zip(params, values(step + 1), strict=True):
            p.grad = g.to(dtype, copy=True)
        if step == 1:
            optimizer.grad_scale = torch.tensor(3.0)
            optimizer.max_grad_norm, optimizer.keep_grads = 1.0, True
        optimizer.step()
        if step == 1:
            del optimizer.grad_scale
            optimizer.max_grad_norm = None
            digest.update(str(optimizer.last_grad_norm.item().hex()).encode())
    for p in params:
        for t in (p.detach(), p.grad, *optimizer.state[p].values()):
            digest.update(t.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# Vectors, and matrices of every kind, also such as are split among threads.
FACTORED = (
    (5000, 1, 1),
    *((), (300,), (40_000,), (1, 7), (3, 700), (300, 65), (9000, 3), (6, 4, 3, 3), (2, 3, 90, 70)),
    *((300, 250), (40, 9000), (2, 270, 260), (70_000, 2), (2, 70_000)),
)


def train_factored(dtype: torch.dtype) -> str:
    """Two steps of Adafactor."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator).to(dtype) for shape in FACTORED]

    params = [torch.nn.Parameter(value) for value in drawn()]
    optimizer = faststep.optim.Adafactor(params, weight_decay=0.1)
    digest = hashlib.sha256()
    for _ in range(2):
        for p, grad in zip(params, drawn(), strict=True):
            p.grad = grad
        optimizer.step()
    for t in [*params, *(t for p in params for t in optimizer.state[p].values())]:
        digest.update(t.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


ORDERS = (2.0, 1.0, 0.0, 3.0, math.inf, -math.inf)


def pass_over(dtype: torch.dtype) -> str:
    """What is measured, unscaled, clamped, scaled and added up of gradients."""
    grads = [value.to(dtype, copy=True) for value in values(1)]
    digest = hashlib.sha256()
    for order in ORDERS:
        norm, _ = faststep._C.norm(grads, order)
        digest.update(norm.hex().encode())
    sums = [value.to(some, copy=True) for value in values(2) for some in DTYPES]
    terms = [grad for grad in grads for _ in DTYPES]
    faststep._C.accumulate(sums, terms, 1 / 3, False)
    faststep._C.accumulate(sums, terms, 1 / 3, False, [total.clone() for total in sums])
    faststep._C.clamp(grads, 0.7)
    faststep._C.scale(grads, 1 / 3)
    for t in (*sums, *grads):
        digest.update(t.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def lines() -> Iterator[str]:
    for dtype in DTYPES:
        for name, options in RUNS:
            yield f"{name} {options} {dtype} {train(name, options, dtype)}"
        yield f"Adafactor {dtype} {train_factored(dtype)}"
        yield f"passes {dtype} {pass_over(dtype)}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    print(faststep._C.cpu_info()["isa"])
    print("\n".join(lines()))
