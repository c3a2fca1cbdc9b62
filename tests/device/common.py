"""The same run on the CPU and on the fake device, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from optim.common import generator, same_bits

from . import fake

SPECIAL = (0.0, -0.0, 1e-42, -1e-42, 3.0e38, float("inf"), float("-inf"), float("nan"))


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    drawn = torch.randn(shape, generator=generator(seed), dtype=torch.float64)
    return (drawn * scale).to(dtype)


class Pair:
    """Parameters on the CPU and copies of them that claim to lie on devices.

    Args:
        tensors: the parameters' first values.
        ordinals: the device of each; None for one that stays on the CPU in both.
    """

    def __init__(self, tensors: Sequence[Tensor], ordinals: Sequence[int | None] = ()) -> None:
        self.ordinals = list(ordinals) or [0] * len(tensors)
        self.cpu = [torch.nn.Parameter(t.clone()) for t in tensors]
        self.cuda = [
            torch.nn.Parameter(t.clone()) if n is None else fake.parameter(t, n)
            for t, n in zip(tensors, self.ordinals, strict=True)
        ]

    def set_grads(self, grads: Iterable[Tensor | None]) -> None:
        for p, q, n, grad in zip(self.cpu, self.cuda, self.ordinals, grads, strict=True):
            p.grad = None if grad is None else grad.clone()
            if grad is None:
                q.grad = None
            else:
                q.grad = grad.clone() if n is None else fake.claim(grad.clone(), n)

    def optimizers(
        self, make: Callable[..., torch.optim.Optimizer], **kwargs: Any
    ) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return make(self.cpu, **kwargs), make(self.cuda, **kwargs)

    def assert_same(
        self, a: torch.optim.Optimizer, b: torch.optim.Optimizer, grads: bool = False
    ) -> None:
        for i, (p, q) in enumerate(zip(self.cpu, self.cuda, strict=True)):
            assert same_bits(p, fake.plain(q)), f"parameter {i}: {p} on the CPU, {q} on the device"
            assert a.state[p].keys() == b.state[q].keys()
            for key, value in a.state[p].items():
                theirs = b.state[q][key]
                assert theirs.device == q.device
                assert same_bits(value, fake.plain(theirs)), f"parameter {i}: state {key}"
            if grads and p.grad is not None:
                assert q.grad is not None
                assert same_bits(p.grad, fake.plain(q.grad)), f"gradient {i}"


def scaler_on(device: int | None, **kwargs: Any) -> Any:
    """A GradScaler of ours whose scale is on a fake device, or on the CPU for None."""
    import faststep

    scaler = faststep.amp.GradScaler("cpu", **kwargs)
    if device is not None:
        scaler._lazy_init_scale_growth_tracker(torch.device("cuda", device))
    else:
        scaler.scale(torch.ones(()))
    return scaler
