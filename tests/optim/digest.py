"""Trains with every rule in every dtype and prints one hash per run: for comparing processes.

    python digest.py [threads]

prints the instruction set in use, then lines of `optimizer options dtype sha256`.
"""

import functools
import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import faststep
from faststep.data import transforms

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


def add(digest: Any, tensors: Iterable[torch.Tensor]) -> None:
    """All bits but those of NaN, of which an operation hands on any."""
    for t in tensors:
        flat = t.detach().reshape(-1).contiguous()
        if t.is_floating_point():
            flat = flat.where(flat == flat, torch.nan)
        digest.update(flat.view(torch.uint8).numpy().tobytes())


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
        add(digest, (p, p.grad, *optimizer.state[p].values()))
    return digest.hexdigest()


NOISE = {"state_dtype": "bf16", "rounding": "stochastic"}
MASTERS = ({"master_weights": True}, {"master_weights": "remainder16"})
SPECIAL = (0.0, -0.0, 1.0, 1e-45, 3e38, math.inf, -math.inf, math.nan)


LAYOUTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda value: value.repeat_interleave(3)[::3],
    lambda value: torch._neg_view(-value),
    lambda value: value.view(-1, 7).t().contiguous().t(),
    lambda value: torch._neg_view(-value.view(-1, 7).t().contiguous().t()),
    lambda value: value,
)
OF_GRADIENTS = (1, 0, 2, 3, 4)


def mix(name: str, options: dict[str, Any]) -> str:
    """Parameters, gradients and states of all types in all layouts, and values that few have."""
    digest, generator = hashlib.sha256(), torch.Generator().manual_seed(3)
    special = torch.cartesian_prod(*[torch.tensor(SPECIAL)] * 2).t()
    has_noise = name not in ("SGD", "Lion") and "state_dtype" not in options
    for number, (of_param, of_grad) in enumerate(itertools.product(DTYPES, DTYPES)):
        noise = (NOISE,) if has_noise and of_param == of_grad else ()
        for form in ({}, *noise, *(MASTERS if of_param == torch.bfloat16 else ())):
            values = torch.randn((3, 5, 77), generator=generator)
            values[:2, 4, :64] = special
            laid_out = zip(LAYOUTS, values[0], strict=True)
            params = [torch.nn.Parameter(lay(value.to(of_param))) for lay, value in laid_out]
            optimizer = getattr(faststep.optim, name)(params, **{**options, **form})
            for drawn in values[1:]:
                for p, value, at in zip(params, drawn, OF_GRADIENTS, strict=True):
                    p.grad_dtype = of_grad
                    p.grad = LAYOUTS[at](value.to(of_grad))
                optimizer.step()
                for p in () if form or "state_dtype" in options else params:
                    state = optimizer.state[p]
                    to = DTYPES[(number + number // 4) % 4]
                    state.update({k: v.to(to) for k, v in state.items() if v.shape == p.shape})
            for p in params:
                add(digest, (p, *optimizer.state[p].values()))
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
    add(digest, [*params, *(t for p in params for t in optimizer.state[p].values())])
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
    add(digest, (*sums, *grads))
    return digest.hexdigest()


def transform() -> str:
    """Images that are cut, resized in both ways and mixed, and channels that are split."""
    digest, generator = hashlib.sha256(), torch.Generator().manual_seed(1)
    source = torch.randint(0, 256, (3, 3, 40, 61), dtype=torch.uint8, generator=generator)
    for images, size, smooth in itertools.product((source, source.float()), (9, 70), (True, False)):
        crop = transforms.RandomResizedCrop(size, antialias=smooth)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            every = [crop, transforms.ToFloat(dtype), transforms.MixUp(1.0, 3)]
            labels = torch.tensor([0, 2, 1])
            add(digest, transforms.Compose(every)(images, labels, generator=generator))
    for width in range(61):
        planes = torch.empty((3, 1, width), dtype=torch.uint8)
        faststep._C.split_channels(source.flatten()[: 3 * width].view(1, width, 3), planes)
        add(digest, [planes])
    return digest.hexdigest()


def small_lines() -> Iterator[str]:
    """Of tensors that no step splits among threads."""
    for name, options in RUNS:
        yield f"{name} {options} mixed {mix(name, options)}"


def lines() -> Iterator[str]:
    yield f"images {transform()}"
    for dtype in DTYPES:
        for name, options in RUNS:
            yield f"{name} {options} {dtype} {train(name, options, dtype)}"
        yield f"Adafactor {dtype} {train_factored(dtype)}"
        yield f"passes {dtype} {pass_over(dtype)}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    print(faststep._C.cpu_info()["isa"])
    print("\n".join([*lines(), *small_lines()]))
