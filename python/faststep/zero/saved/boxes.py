"""Cuts a range of a tensor's memory into boxes: ranges of indices in every dimension.

torch.distributed.checkpoint knows parts of tensors as boxes. What a rank owns of a parameter is one
range of its memory, which at most two boxes per dimension make up. Arithmetic only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]  # its first index in each dimension
    sizes: tuple[int, ...]
    at: int  # where it begins in the range, in elements


def boxes_of(begin: int, count: int, sizes: Sequence[int], strides: Sequence[int]) -> Iterator[Box]:
    """The boxes that make up a range of a tensor's memory, in the order of memory.

    Each box is one piece of memory. `strides` are those of a tensor without gaps.
    """
    if not math.prod(sizes):
        yield Box((0,) * len(sizes), tuple(sizes), 0)
        return
    order = sorted(
        (dim for dim, size in enumerate(sizes) if size > 1), key=lambda dim: -strides[dim]
    )
    at = 0
    for offsets, lengths in _cut(begin, begin + count, [sizes[dim] for dim in order]):
        where, extent = [0] * len(sizes), [1] * len(sizes)
        for dim, offset, length in zip(order, offsets, lengths, strict=True):
            where[dim], extent[dim] = offset, length
        yield Box(tuple(where), tuple(extent), at)
        at += math.prod(extent)


def _cut(begin: int, end: int, sizes: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The same for a row-major tensor, as offsets and lengths."""
    if begin >= end:
        return
    if not sizes:
        yield [], []
        return
    row = math.prod(sizes[1:])
    first, last = begin // row, (end - 1) // row
    if first == last:
        yield from _inside(first, begin - first * row, end - first * row, sizes)
        return
    low = first if begin == first * row else first + 1
    high = last + 1 if end == (last + 1) * row else last
    if low > first:
        yield from _inside(first, begin - first * row, row, sizes)
    if low < high:
        yield [low, *[0] * len(sizes[1:])], [high - low, *sizes[1:]]
    if high == last:
        yield from _inside(last, 0, end - last * row, sizes)


def _inside(
    index: int, begin: int, end: int, sizes: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """The boxes at one index of the first dimension."""
    for offsets, lengths in _cut(begin, end, sizes[1:]):
        yield [index, *offsets], [1, *lengths]
