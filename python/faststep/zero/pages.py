"""Memory that goes back to the system as soon as it is free.

The C library keeps freed blocks of up to 32 MiB, and few of them fit the next bucket.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

__all__ = ["new_pages"]

_LEAST = 2**20  # bytes; the C library has smaller blocks at hand


def new_pages(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor of zeros."""
    nbytes = count * dtype.itemsize
    if device.type != "cpu" or nbytes < _LEAST:
        return torch.zeros(count, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)
