"""No finite gradient makes a parameter infinite or NaN where torch's class keeps a number."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import faststep.optim

COUNT = 520
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# Per class the values of each option; all combinations are tried.
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "SGD": {"lr": [1e-2], "momentum": [0, 0.9], "nesterov": [False], "weight_decay": [0, 0.1]},
    "Adam": {"amsgrad": [False, True], "eps": [1e-8, 1e-3], "betas": [(0.9, 0.999), (0.0, 0.5)]},
    "AdamW": {"amsgrad": [False, True], "eps": [1e-8, 1e-3]},
    "Adamax": {"eps": [1e-8, 1e-3], "weight_decay": [0, 0.1]},
    "NAdam": {"eps": [1e-8, 1e-3], "decoupled_weight_decay": [False, True], "weight_decay": [0.1]},
    "RAdam": {"eps": [1e-8, 1e-3], "betas": [(0.9, 0.999), (0.5, 0.5)], "weight_decay": [0, 0.1]},
    "RMSprop": {
        "centered": [False, True],
        "momentum": [0, 0.9],
        "eps": [1e-8, 1e-3],
        "alpha": [0.99, 0.1],
        "weight_decay": [0, 0.1],
    },
    "Adadelta": {"eps": [1e-6, 1e-3], "rho": [0.9, 0.5], "lr": [1.0]},
    "Adagrad": {"eps": [1e-10, 1e-3], "lr_decay": [0, 0.1], "initial_accumulator_value": [0, 0.1]},
    "Rprop": {"etas": [(0.5, 1.2), (0.1, 2.0)]},
    "ASGD": {"t0": [1e6, 2], "lambd": [1e-4, 0.1], "alpha": [0.75, 1.0]},
    "Adafactor": {"weight_decay": [0, 0.1], "beta2_decay": [-0.8, -0.3]},
}


def _scaled(size: float) -> Callable[[int, Tensor, torch.finfo], Tensor]:
    return lambda step, noise, finfo: noise * size


# The gradient of a step, in fp64, from noise and the limits of the dtype.
GRADIENTS: dict[str, Callable[[int, Tensor, torch.finfo], Tensor]] = {
    "ordinary": _scaled(1.0),
    "small": _scaled(1e-3),
    "smaller": _scaled(1e-5),
    "constant": lambda step, noise, finfo: torch.linspace(-3, 3, COUNT, dtype=torch.float64),
    "constants": lambda step, noise, finfo: 10.0 ** (torch.arange(COUNT).double() % 13 - 8),
    "off centre": lambda step, noise, finfo: 1.0 + 1e-3 * noise,
    "huge": lambda step, noise, finfo: noise.clamp(-1, 1) * finfo.max,
    "subnormal": lambda step, noise, finfo: noise * finfo.smallest_normal / 8,
    "rare": lambda step, noise, finfo: noise * (noise.abs() > 1) * 1e-3,
    "then none": lambda step, noise, finfo: noise * (step < 3),
    "all sizes": lambda step, noise, finfo: noise * 10.0 ** (torch.arange(COUNT) % 12 - 7),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", OPTIONS)
def test_no_finite_gradient_gives_what_torch_does_not(name: str, dtype: torch.dtype) -> None:
    finfo = torch.finfo(dtype)
    options = OPTIONS[name]
    cases = [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]
    # Elements do not look at each other, but in Adafactor.
    for kinds in [[kind] for kind in GRADIENTS] if name == "Adafactor" else [[*GRADIENTS]]:
        start = torch.randn(26 * len(kinds), COUNT // 26).to(dtype)
        pairs = []
        for kwargs in cases:
            pair = [torch.nn.Parameter(start.clone()) for _ in range(2)]
            theirs = getattr(torch.optim, name)(pair[:1], **kwargs)
            pairs.append((pair, [theirs, getattr(faststep.optim, name)(pair[1:], **kwargs)]))
        for step in range(40):
            noise = torch.randn(COUNT, dtype=torch.float64)
            grad = torch.cat([GRADIENTS[kind](step, noise, finfo) for kind in kinds])
            grad = grad.clamp(finfo.min, finfo.max).to(dtype).reshape(start.shape)
            for pair, optimizers in pairs:
                for param, optimizer in zip(pair, optimizers, strict=True):
                    param.grad = grad.clone()
                    optimizer.step()
        for kwargs, ((theirs, mine), _) in zip(cases, pairs, strict=True):
            lost = (theirs.isfinite() & ~mine.isfinite()).view(len(kinds), COUNT).sum(1)
            assert not lost.any(), f"{kwargs}: {dict(zip(kinds, lost.tolist(), strict=True))}"
