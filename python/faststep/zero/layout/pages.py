"""Memory that goes back to the system as soon as nobody needs what is in it.

The C library keeps freed blocks of up to 32 MiB, and few of them fit the next bucket.
"""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

_LEAST = 2**20  # bytes; the C library has smaller blocks at hand


class Pages:
    """A flat tensor of zeros, and its memory.

    The memory lives as long as the tensor or a view of it.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        nbytes = count * dtype.itemsize
        self.tensor: Tensor
        self._map: mmap.mmap | None = None
        if device.type != "cpu" or nbytes < _LEAST:
            self.tensor = torch.zeros(count, dtype=dtype, device=device)
            return
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=dtype)

    def forget(self) -> None:
        """Give the memory back; all elements become 0."""
        if self._map is None or sys.platform != "linux":  # elsewhere the values may stay
            self.tensor.zero_()
        else:
            self._map.madvise(mmap.MADV_DONTNEED)


class BufferPool:
    """Blocks of CPU memory for messages, each used again by those that follow."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes  # of a block, the longest message; a block takes what was used of it
        self._free: list[Tensor] = []

    def grow(self, nbytes: int) -> None:
        """Let blocks be of at least so many bytes."""
        if nbytes > self._nbytes:
            self._nbytes = nbytes
            self._free.clear()

    def take(self) -> Tensor:
        """A block as bytes with any values."""
        if self._free:
            return self._free.pop()
        return Pages(self._nbytes, torch.uint8, torch.device("cpu")).tensor

    def give_back(self, block: Tensor) -> None:
        """Take back a block that nobody uses any more."""
        self._free.append(block)

    def clear(self) -> None:
        """Let the memory go back to the system."""
        self._free.clear()
