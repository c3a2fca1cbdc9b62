"""offload() of CUDA parameters, on a device whose streams run as late as they may."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from faststep.amp import GradScaler
from faststep.offloading import places
from offload.common import assert_same, bits

from . import fake, late
from .common import scaler_on

SHAPES = ((300, 130), (130,), (), (40, 77))
FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "masters": (torch.bfloat16, {"master_weights": True}),
    "few bits": (torch.bfloat16, {"master_weights": "remainder16", "state_dtype": "int8"}),
}


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=source) * 0.1).to(dtype)


class Twins:
    """Parameters on the late device that are offloaded, and the same in CPU memory."""

    def __init__(
        self,
        device: late.Late,
        dtype: torch.dtype = torch.float32,
        how: dict[str, Any] | None = None,
        kind: Callable[..., Any] = faststep.optim.AdamW,
        **options: Any,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.sources: list[Tensor] = []
        self.cpu = [nn.Parameter(values(shape, i, dtype)) for i, shape in enumerate(SHAPES)]
        self.cuda = [nn.Parameter(self.new(p.detach(), late=False)) for p in self.cpu]
        self.a, self.b = (kind(ps, lr=0.01, **options) for ps in (self.cpu, self.cuda))
        self.handle: Any = faststep.offload(self.b, threads=2, **(how or {}))

    def write(self, tensor: Tensor, elements: Tensor) -> None:
        """As an operation in place writes them, when the current stream comes to it."""
        source = torch.empty_like(elements, pin_memory=True).copy_(elements)
        self.sources.append(source)
        self.device.upload(tensor, source)
        torch.autograd.graph.increment_version(tensor)

    def new(self, elements: Tensor, late: bool = True) -> Tensor:
        made = torch.empty_like(elements, device="cuda")
        if late:
            self.write(made, elements)
        else:
            fake.plain(made).copy_(elements)
        return made

    def grads(self, seed: int, scale: float = 1.0) -> list[Tensor]:
        return [values(p.shape, 100 * seed + i, self.dtype) * scale for i, p in enumerate(self.cpu)]

    def arrive(self, index: int, grad: Tensor | None = None) -> None:
        """A gradient as backward leaves it; None: `.grad` was accumulated in place."""
        param = self.cuda[index]
        if grad is not None:
            param.grad = self.new(grad)
        for hook in [*(param._post_accumulate_grad_hooks or {}).values()]:  # type: ignore[attr-defined]
            hook(param)

    def backward(self, seed: int, scale: float = 1.0) -> None:
        """New gradients, the last parameter's first."""
        for index, grad in reversed([*enumerate(self.grads(seed, scale))]):
            self.cpu[index].grad = grad.clone()
            self.arrive(index, grad)

    def found(self) -> list[Tensor]:
        """The parameters as the current stream finds them."""
        read = [self.device.read(param) for param in self.cuda]
        self.device.current.synchronize()
        return read

    def assert_same(self) -> None:
        assert_same(bits(self.found()), bits([p.detach() for p in self.cpu]))
        states = [bits(one.state_dict(native=True)) for one in (self.b, self.a)]
        assert_same(*states)
        assert_same(bits(self.b.last_grad_norm), bits(self.a.last_grad_norm))
        assert all(
            value.is_cpu
            for state in self.b.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "KINDS", (*places.KINDS, fake.OnCuda))


@pytest.fixture
def world(device: late.Late) -> Iterator[late.Late]:
    """The device; nothing of the offload may be left."""
    yield device
    device.machine.synchronize()
    gc.collect()


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_bits(world: late.Late, stored: str, max_norm: float | None) -> None:
    dtype, options = FORMATS[stored]
    twins = Twins(world, dtype, max_grad_norm=max_norm, **options)
    for step in range(4):
        twins.backward(step)
        twins.a.step()
        twins.b.step()
        twins.assert_same()
        twins.b.zero_grad()
