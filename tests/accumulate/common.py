"""Small models, uneven batches and plain-torch references for the tests of accumulation."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import faststep

Batch = tuple[Tensor, Tensor]
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "faststep AdamW": lambda ps: faststep.optim.AdamW(ps, lr=0.01),
    "faststep SGD": lambda ps: faststep.optim.SGD(ps, lr=0.1, momentum=0.9),
    "torch fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "torch SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "torch Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
}


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    model.append(nn.Linear(16, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
    return model.to(dtype)


class OddLayouts(nn.Module):
    """More than a chunk, a transposed parameter, channels last, and a scalar."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(1)
        self.large = nn.Parameter((torch.randn(20000, generator=source) * 0.01).to(dtype))
        self.turned = nn.Parameter((torch.randn(7, 30, generator=source) * 0.1).to(dtype).t())
        last = (torch.randn(4, 3, 2, 2, generator=source) * 0.1).to(dtype)
        self.last = nn.Parameter(last.to(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.to(self.turned.dtype) @ self.turned).float().square().sum()
        weights = (self.last.float() * torch.arange(48.0).view(4, 3, 2, 2)).sum().cos()
        return rows * self.scalar.float() + weights * self.large.float().square().sum()


def batches(sizes: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(100 + seed)
    return [
        (torch.randn(size, 6, generator=generator).to(dtype), labels(size, generator))
        for size in sizes
    ]


def labels(size: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 3, (size,), generator=generator)


def joined(parts: Sequence[Batch]) -> Batch:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def loss_of(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    out = model(batch[0]).float()
    return nn.functional.cross_entropy(out, batch[1], reduction=reduction)


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def grads(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def assert_equal(left: Sequence[Any], right: Sequence[Any]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or a.dtype == b.dtype
        assert a is None or torch.equal(a, b), (a - b).abs().max()


def assert_close(left: Sequence[Any], right: Sequence[Any], relative: float) -> None:
    """The largest difference over the largest value, tensor for tensor."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            difference = (a.double() - b.double()).abs().max()
            assert difference <= relative * b.double().abs().max(), difference


def finish(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def micro_steps(accum: Any, model: nn.Module, window: Sequence[Batch], scaler: Any = None) -> None:
    """Backward passes of a window, through a scaler if there is one."""
    for batch in window:
        with accum:
            if scaler is None:
                accum.backward(loss_of(model, batch))
            else:
                scaler.scale(loss_of(model, batch)).backward()
