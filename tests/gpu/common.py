"""The same run on the CPU and on a CUDA device, side by side."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import faststep
from faststep import _C
from optim.common import generator
from optim.common import same_bits as same_memory

CUDA = torch.device("cuda", 0)
SPECIAL = (0.0, -0.0, 1e-42, -1e-42, 3.0e38, float("inf"), float("-inf"), float("nan"))


def what_is_missing() -> str | None:
    """What tests of a real device lack here; None where they can run."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if not _C.has_kernels():
        return "this build of faststep has no CUDA kernels: FASTSTEP_CUDA=1 builds them"
    return None


# On a real device where there is one, else on the fake machine of tests/device. FASTSTEP_FAKE_GPU
# decides it: 1 takes the fake machine, and 0 refuses it.
FAKE = os.environ.get("FASTSTEP_FAKE_GPU")
REHEARSAL = FAKE == "1" or (FAKE is None and what_is_missing() is not None)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """As in the CPU's tests, but any NaN equals any other: a GPU's has bits of its own."""
    if REHEARSAL:
        return same_memory(left, right)
    a, b = (
        t.detach().where(~t.isnan(), torch.nan) if t.is_floating_point() else t
        for t in (left, right)
    )
    return same_memory(a, b)


def values(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    drawn = torch.randn(shape, generator=generator(seed), dtype=torch.float64)
    return (drawn * scale).to(dtype)


def place(tensor: Tensor, device: torch.device | str, factor: float = 1.0) -> Tensor:
    """A copy on a device with the same strides and offset, multiplied by a power of two."""
    if tensor.is_neg():
        return torch._neg_view(place(torch._neg_view(tensor.detach()), device, factor))
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.as_strided(tensor.detach(), (size,), (1,), 0) * factor
    moved = whole.to(device, copy=True)
    return moved.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Twins:
    """Equal parameters on the CPU and on CUDA devices.

    Args:
        tensors: the parameters' first values.
        devices: where the second set lies; default: all on the first CUDA device.
    """

    def __init__(self, tensors: Sequence[Tensor], devices: Sequence[str] = ()) -> None:
        self.devices = [torch.device(d) for d in devices] or [CUDA] * len(tensors)
        self.cpu = [torch.nn.Parameter(place(t, "cpu")) for t in tensors]
        self.cuda = [
            torch.nn.Parameter(place(t, d)) for t, d in zip(tensors, self.devices, strict=True)
        ]

    def set_grads(self, grads: Iterable[Tensor | None], factor: float = 1.0) -> None:
        """New gradients in new memory, as after zero_grad(set_to_none=True)."""
        for p, q, d, grad in zip(self.cpu, self.cuda, self.devices, grads, strict=True):
            for parameter, device in ((p, torch.device("cpu")), (q, d)):
                if grad is not None and grad.dtype != parameter.dtype:
                    parameter.grad_dtype = grad.dtype
                parameter.grad = None if grad is None else place(grad, device, factor)

    def draw_grads(self, step: int, factor: float = 1.0) -> None:
        """Other gradients for each step, in the parameters' dtypes."""
        self.set_grads(
            [values(tuple(p.shape), 1000 * step + i, p.dtype) for i, p in enumerate(self.cpu)],
            factor,
        )

    def optimizers(self, make: Callable[..., Any], **kwargs: Any) -> tuple[Any, Any]:
        return make(self.cpu, **kwargs), make(self.cuda, **kwargs)

    def train(self, both: tuple[Any, Any], steps: int, grads: bool = False) -> None:
        """Steps with other gradients each, after each of which the two sides are the same."""
        for step in range(steps):
            self.draw_grads(step)
            for optimizer in both:
                optimizer.step()
            self.assert_same(*both, grads=grads)

    def assert_same(self, a: Any, b: Any, grads: bool = False) -> None:
        """Parameters, states and, if asked, gradients have the same bits."""
        for i, (p, q) in enumerate(zip(self.cpu, self.cuda, strict=True)):
            assert same_bits(p, q.cpu()), f"parameter {i}: {p} on the CPU, {q.cpu()} on {q.device}"
            assert a.state[p].keys() == b.state[q].keys()
            for key, value in a.state[p].items():
                theirs = b.state[q][key]
                assert theirs.device == q.device
                assert same_bits(value, theirs.cpu()), f"parameter {i}: state {key}"
            if grads and p.grad is not None:
                assert q.grad is not None
                assert same_bits(p.grad, q.grad.cpu()), f"gradient {i}"


def scalers(make: Any = faststep.amp.GradScaler, **kwargs: Any) -> tuple[Any, Any]:
    """A scaler for the CPU and one for CUDA, with their scales made."""
    made = make("cpu", **kwargs), make("cuda", **kwargs)
    for scaler, device in zip(made, ("cpu", CUDA), strict=True):
        scaler.scale(torch.zeros((), device=device))
    return made


def assert_same_scales(a: Any, b: Any) -> None:
    assert same_bits(a._scale, b._scale.cpu())
    assert same_bits(a._growth_tracker, b._growth_tracker.cpu())


@contextmanager
def no_synchronization() -> Iterator[None]:
    """torch raises an error where something inside waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def needs_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
