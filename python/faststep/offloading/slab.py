"""Host memory for parameters, gradients and states: one mapping, taken at once."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """The room that copies of these tensors take."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


class Slab:
    """Memory that is handed out from its beginning to its end.

    Each tensor has a storage of its own, so that `torch.save` writes no other with it, and keeps
    the mapping alive. A child process gets a copy.
    """

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, max(size, 1), flags=flags)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._used = 0

    def take(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros of a tensor's shape and strides, and of its dtype or another one."""
        dtype, count = dtype or like.dtype, like.numel()
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used)
        self._used += -(-flat.nbytes // ALIGNMENT) * ALIGNMENT
        return flat.as_strided(like.size(), like.stride()).detach()
