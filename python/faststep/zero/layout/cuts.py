"""Where parameters lie in flat buckets, and which part of each bucket a rank owns. Arithmetic only.

The ranks' slices of a bucket have one size. Their borders lie between two parameters, or inside of
one at a chunk's border. A chunk is `CHUNK` elements of a parameter, counted from the parameter's
own start: the unit in which norms are summed. So each chunk belongs to one rank, and ranks need to
exchange nothing but chunks' sums to get a norm with the same bits as one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

__all__ = ["CHUNK", "Bucket", "Flat", "Piece", "Span", "chunks_in", "make_buckets"]

CHUNK = 16384  # elements; FST_CHUNK in csrc/base/work.h
TOGETHER = 4  # parameters of a module: weights and biases
ALIGNMENT = 128  # bytes between the starts of parameters are a multiple of this


class Flat(NamedTuple):
    """A parameter, as the layout needs to know it."""

    size: int  # elements
    dtype: torch.dtype
    device: torch.device
    owner: str | None = None  # the module that has it


class Span(NamedTuple):
    """Where a parameter lies in its bucket, in elements."""

    param: int
    begin: int
    size: int


class Piece(NamedTuple):
    """The part of a parameter that a rank owns: elements in the order of its memory."""

    param: int
    begin: int  # in the parameter
    size: int
    at: int  # in the bucket


class Bucket(NamedTuple):
    """Parameters of one dtype and device, side by side, in slices of one size."""

    dtype: torch.dtype
    device: torch.device
    places: tuple[Span, ...]
    size: int  # elements, with the gaps
    part: int  # elements of a slice

    def slice_of(self, rank: int) -> slice:
        """The elements that a rank owns."""
        return slice(self.part * rank, self.part * (rank + 1))

    def pieces_of(self, rank: int) -> Iterator[Piece]:
        """The pieces of parameters that a rank owns. Parameters without elements are rank 0's."""
        low, high = self.part * rank, self.part * (rank + 1)
        for param, begin, size in self.places:
            if not size:
                if rank == 0:
                    yield Piece(param, 0, 0, low)
                continue
            first, last = max(begin, low), min(begin + size, high)
            if first < last:
                yield Piece(param, first - begin, last - first, first)


def chunks_in(count: int) -> int:
    """The number of chunks of so many elements."""
    return -(-count // CHUNK)


def make_buckets(
    params: Sequence[Flat],
    world: int,
    bucket_bytes: float,
    last_bytes: float | None = None,
) -> list[Bucket]:
    """Lay parameters out, in the order given, in buckets of about `bucket_bytes`.

    A bucket is complete with the parameter that fills it. Buckets come in the order in which they
    are complete. With `last_bytes` the last bucket of each dtype is of about this size, and each
    one before it of twice the size of the next, up to `bucket_bytes`; up to four parameters of
    one module stay together.
    """
    if last_bytes is None:
        complete = _filled(params, bucket_bytes)
    else:
        complete = _growing(params, min(last_bytes, bucket_bytes), bucket_bytes)
    return [_placed(params, members, world) for members in complete]


def _filled(params: Sequence[Flat], bucket_bytes: float) -> list[list[int]]:
    """The members of each bucket, where all have one size."""
    open_now: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}  # bytes
    complete = []
    for index, param in enumerate(params):
        kind = param.dtype, param.device
        open_now.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + param.size * param.dtype.itemsize
        if filled[kind] >= bucket_bytes:
            complete.append(open_now.pop(kind))
            del filled[kind]
    return [*complete, *open_now.values()]


def _growing(params: Sequence[Flat], least: float, most: float) -> list[list[int]]:
    """The members of each bucket, from small ones at the end to large ones."""
    made: dict[tuple[torch.dtype, torch.device], list[list[int]]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}  # bytes
    for index in reversed(range(len(params))):
        param = params[index]
        kind = param.dtype, param.device
        buckets = made.setdefault(kind, [[]])
        limit = min(most, least * 2 ** (len(buckets) - 1))
        last = [params[other].owner for other in buckets[-1][-TOGETHER:]]
        alike = param.owner is not None and last[-1:] == [param.owner]
        stays = alike and last.count(param.owner) < TOGETHER
        if buckets[-1] and filled[kind] >= limit and not stays:
            buckets.append([])
            filled[kind] = 0
        buckets[-1].append(index)
        filled[kind] = filled.get(kind, 0) + param.size * param.dtype.itemsize
    complete = [members[::-1] for buckets in made.values() for members in buckets]
    return sorted(complete, key=lambda members: members[-1])


def _placed(params: Sequence[Flat], members: list[int], world: int) -> Bucket:
    """One bucket.

    A parameter that has a border inside begins a whole number of chunks before it. So up to a chunk
    of memory is left out at each border.
    """
    dtype, device = params[members[0]].dtype, params[members[0]].device
    step = ALIGNMENT // dtype.itemsize
    sizes = [params[index].size for index in members]
    largest = _rounded_up(max(sizes), step)
    part = _rounded_up(-(-sum(_rounded_up(size, step) for size in sizes) // world), step)
    while True:
        begins, end = _begins(sizes, part, world, step)
        if end > part * world:
            part += _rounded_up(-(-(end - part * world) // world), step)
        elif part and not _is_cut_in_chunks(begins, sizes, part, world):
            # A parameter has several borders inside, but none larger than a slice has.
            part = min(at for at in (_rounded_up(part + 1, CHUNK), largest) if at > part)
        else:
            break
    places = tuple(Span(*place) for place in zip(members, begins, sizes, strict=True))
    return Bucket(dtype, device, places, part * world, part)


def _begins(sizes: Sequence[int], part: int, world: int, step: int) -> tuple[list[int], int]:
    """Where parameters begin between borders at multiples of `part`, and where the last ends."""
    begins, end = [], 0
    for size in sizes:
        border = (end // part + 1) * part if part else 0
        if border < min(end + size, part * world):
            end += (border - end) % CHUNK
        begins.append(end)
        end += _rounded_up(size, step)
    return begins, end


def _is_cut_in_chunks(begins: Sequence[int], sizes: Sequence[int], part: int, world: int) -> bool:
    """True if all borders inside of parameters lie between their chunks."""
    return not any(
        begin < border < begin + size and (border - begin) % CHUNK
        for begin, size in zip(begins, sizes, strict=True)
        for border in range(part, part * world, part)
    )


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step
