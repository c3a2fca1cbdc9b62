"""The devices that an optimizer's parameters lie on, and the numbers that a step keeps on each.

The C side calls a device by a number: -1 for CPU memory, else the CUDA ordinal.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from . import _C

HOST = -1
HOST_ONLY = (HOST,)


class Scalars(NamedTuple):
    """The numbers of a step that lie on one device: 0-d float32 or float64 tensors or None."""

    grad_scale: Tensor | None
    found_inf: Tensor | None
    norm: Tensor | None


def ordinal_of(tensor: Tensor) -> int:
    """The number of a tensor's device."""
    device = tensor.device
    return (device.index or 0) if device.type == "cuda" else HOST


@functools.cache
def _usable(number: int) -> bool:
    try:
        _C.device_info(number)
    except RuntimeError:
        return False
    return True


def has_kernels_for(tensor: Tensor) -> bool:
    """True if this build, driver and device can run our kernels on a CUDA tensor."""
    return _C.has_kernels() and _usable(ordinal_of(tensor))


def devices_of(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """The numbers of the devices that occur, the host first."""
    return tuple(sorted({ordinal_of(tensor) for tensor in tensors})) or HOST_ONLY


def _device(number: int) -> torch.device:
    return torch.device("cpu") if number == HOST else torch.device("cuda", number)


def new_scalar(number: int, dtype: torch.dtype) -> Tensor:
    """A 0-d tensor of zero on a device."""
    return torch.zeros((), dtype=dtype, device=_device(number))


_Scalar = TypeVar("_Scalar", Tensor, "Tensor | None")


def on_device(scalar: _Scalar, number: int) -> _Scalar:
    """The tensor itself, or a copy of it on another device; waits for one only on the host."""
    if scalar is None or (scalar.is_cpu if number == HOST else ordinal_of(scalar) == number):
        return scalar
    return scalar.to(_device(number), non_blocking=number != HOST)


def agree(scalars: dict[int, Scalars]) -> dict[int, Scalars]:
    """Give each device the common norm (the root of the sum of squares) and the common flag."""
    rows = list(scalars.values())
    first = next(iter(scalars))
    norms = [on_device(row.norm, first) for row in rows if row.norm is not None]
    flags = [on_device(row.found_inf, first) for row in rows if row.found_inf is not None]
    norm = torch.stack([n.double() for n in norms]).square().sum().sqrt() if norms else None
    flag = (torch.stack([f.float() for f in flags]) != 0.0).any().float() if flags else None
    return {
        device: Scalars(
            row.grad_scale,
            on_device(flag, device),
            on_device(norm, device),
        )
        for device, row in scalars.items()
    }
