"""The devices that tensors lie on.

The C side calls a device by a number: -1 for CPU memory, else the CUDA ordinal.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch import Tensor

from . import _C

HOST = -1
HOST_ONLY = (HOST,)


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
