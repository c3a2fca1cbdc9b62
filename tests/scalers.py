"""GradScalers for tests: ready to step on the CPU, and driven through overflows."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from faststep.amp import GradScaler

Make = Callable[[list[Parameter]], torch.optim.Optimizer]
TORCHS_OPTIMIZERS: dict[str, Make] = {
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "AdamW for-loop": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=False),
    "SGD fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "SGD foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "SGD for-loop": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
}


class Doubtful(GradScaler):
    """Reports an overflow whatever the gradients say, as a sharded scaler may for other ranks."""

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, Tensor]:
        return {d: torch.ones_like(t) for d, t in super()._unscale_grads_(*args).items()}


def make_scaler(
    cls: type[torch.amp.GradScaler] = GradScaler, init_scale: float = 8.0, **kwargs: Any
) -> Any:
    """A scaler whose scale tensor exists."""
    scaler = cls("cpu", init_scale, **kwargs)
    scaler.scale(torch.zeros(()))
    return scaler


def make_param(*values: float, grad: list[float] | None = None) -> Parameter:
    """A parameter with these elements, and a gradient if one is given."""
    param = Parameter(torch.tensor(values))
    if grad is not None:
        param.grad = torch.tensor(grad)
    return param


def iterate(scaler: Any, overflow: bool) -> float:
    """One iteration with or without an overflow; the scale after it."""
    param = make_param(1.0, grad=[math.inf if overflow else 1.0])
    scaler.step(torch.optim.SGD([param], lr=0.1))
    scaler.update()
    return float(scaler.get_scale())


class Training:
    """Some iterations on given gradients, of which some overflow."""

    def __init__(self, cls: type[Any], make: Make, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)
        shapes = [(5, 3), (7,), (), (0,)]
        self.params = [Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
        self.grads = [
            [torch.randn(s, generator=generator).to(dtype) for s in shapes] for _ in range(6)
        ]
        self.grads[2][1][4] = math.inf
        self.grads[4][2].fill_(math.nan)
        self.optimizer = make(self.params)
        self.scaler = make_scaler(cls, 16.0, growth_interval=2)

    def run(self, body: Callable[[Any, torch.optim.Optimizer], Any]) -> list[Tensor]:
        """Every parameter, gradient and scale, and the states at the end."""
        history: list[Tensor] = []
        for grads in self.grads:
            scale = self.scaler.get_scale()
            for param, grad in zip(self.params, grads, strict=True):
                param.grad = grad * scale
            body(self.scaler, self.optimizer)
            self.scaler.update()
            history += [p.detach().clone() for p in self.params]
            history += [p.grad for p in self.params]
            history.append(torch.tensor(self.scaler.get_scale()))
        states = self.optimizer.state_dict()["state"].values()
        return history + [t for s in states for t in s.values() if isinstance(t, Tensor)]


def plain_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """The body of an iteration without clipping."""
    scaler.step(optimizer)
