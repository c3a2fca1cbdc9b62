"""Host memory for parameters, gradients and states: one mapping, taken at once."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.dtensor import is_dtensor, like_dtensor, local_of, part_of
from .link import Link

ALIGNMENT = 64  # bytes


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """The room that copies of these tensors take, or of parts of DTensors."""
    return sum(-(-part_of(tensor).nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


class _Locked(mmap.mmap):
    """A mapping that is page-locked for all CUDA devices.

    It is shared with child processes: after a fork the parent would write to a copy of a private
    one, while the device has the old pages.
    """

    _address: int
    _link: Link
    _owner: int  # the process in which it is page-locked

    def __new__(cls, size: int, link: Link) -> _Locked:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self = super().__new__(cls, -1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        self.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        self._link, self._owner = link, 0
        code = int(_cudart().cudaHostRegister(self._address, size, 1))
        if code:
            raise RuntimeError(
                f"offload() cannot page-lock {size} bytes of host memory (CUDA error {code}): "
                "free memory, or raise the limit that `ulimit -l` shows"
            )
        self._owner = os.getpid()
        return self

    def __del__(self) -> None:
        if self._owner == os.getpid() and not sys.is_finalizing():
            self._link.synchronize()
            _cudart().cudaHostUnregister(self._address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Slab:
    """Memory that is handed out from its beginning to its end, page-locked if there is a link.

    Each tensor has a storage of its own, so that `torch.save` writes no other with it, and keeps
    the mapping alive. A child process gets a copy of memory that is not page-locked.
    """

    def __init__(self, size: int, link: Link | None) -> None:
        self._memory: mmap.mmap
        if link is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, max(size, 1), flags=flags)
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        else:
            self._memory = _Locked(max(size, 1), link)
        self._used = 0

    def take(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros of a tensor's shape and strides, and of its dtype or another one."""
        if is_dtensor(like):
            return like_dtensor(like, self.take(local_of(like), dtype))
        dtype, count = dtype or like.dtype, like.numel()
        if not count:
            return torch.empty(like.size(), dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used)
        self._used += -(-flat.nbytes // ALIGNMENT) * ALIGNMENT
        return flat.as_strided(like.size(), like.stride()).detach()
