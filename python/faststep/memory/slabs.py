"""Page-locked host memory for tensors, taken in slabs that stay."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable

from torch import Tensor

LEAST = 64 << 20  # bytes of a slab
MOST = 1 << 30  # unless a single range is larger
HELD = 4  # a slab has room for that many ranges of the size that it is made for, up to MOST
ALIGNMENT = 512


class PoolSlab:
    """Memory, and the ranges of it that are free, in order."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.free = [(0, memory.numel())]


Range = tuple[PoolSlab, int, int]  # bytes of a slab, from one to the other


class Slabs:
    """A pool of page-locked memory.

    Args:
        make: makes a slab, a uint8 tensor of so many bytes.

    Attributes:
        slabs: all of them.
        returned: gets the ranges that are free again. Any thread may append one, also while it
            collects garbage.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self.slabs: list[PoolSlab] = []
        self.returned: deque[Range] = deque()

    def take(self, nbytes: int) -> Range:
        """A range of at least so many bytes; one thread at a time."""
        self.take_back()
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for slab in self.slabs:
            for place, (start, end) in enumerate(slab.free):
                if end - start >= size:
                    slab.free[place : place + 1] = [(start + size, end)] * (end - start > size)
                    return slab, start, start + size
        room = max(LEAST, size, min(HELD * size, MOST))
        # torch's own pool rounds up to a power of two
        self.slabs.append(PoolSlab(self._make(1 << (room - 1).bit_length())))
        return self.take(nbytes)

    def take_back(self) -> None:
        """Let the ranges that are free again be taken."""
        while self.returned:
            slab, start, end = self.returned.popleft()
            place = bisect.bisect(slab.free, (start, end))
            if place < len(slab.free) and slab.free[place][0] == end:
                end = slab.free.pop(place)[1]
            if place and slab.free[place - 1][1] == start:
                place -= 1
                start = slab.free.pop(place)[0]
            slab.free.insert(place, (start, end))
