"""Where parameters lie in flat buckets, and which part of each bucket a rank owns. Arithmetic only.

The ranks' slices of a bucket have one size. Their borders lie between two parameters, or inside of
one at a chunk's border. A chunk is `CHUNK` elements of a parameter, counted from the parameter's
own start: the unit in which norms are summed. So each chunk belongs to one rank, and ranks need to
exchange nothing but chunks' sums to get a norm with the same bits as one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...optim.param_shards import CHUNK

TOGETHER = 4  # parameters of a module: weights and biases
ALIGNMENT = 128  # bytes between the starts of parameters are a multiple of this


class Flat(NamedTuple):
    """A parameter, as the layout needs to know it."""

    size: int  # elements
    dtype: torch.dtype
    owner: str | None = None  # the module that has it


class Span(NamedTuple):
    """Where a parameter lies in its bucket, in elements."""

    param: int
    begin: int
    size: int


class Piece(NamedTuple):
    """The part of a parameter that a rank owns: elements in the order of its memory."""

    place: int  # the number of the parameter in the bucket
    begin: int  # in the parameter
    size: int
    at: int  # in the bucket


class Bucket(NamedTuple):
    """Parameters of one dtype, side by side, in slices of one size."""

    dtype: torch.dtype
    places: tuple[Span, ...]
    size: int  # elements, with the gaps
    part: int  # elements of a slice

    def slice_of(self, rank: int) -> slice:
        """The elements that a rank owns."""
        return slice(self.part * rank, self.part * (rank + 1))

    def pieces_of(self, rank: int) -> Iterator[Piece]:
        """The pieces of parameters that a rank owns. Parameters without elements are rank 0's."""
        low, high = self.part * rank, self.part * (rank + 1)
        for place, (_, begin, size) in enumerate(self.places):
            if not size:
                if rank == 0:
                    yield Piece(place, 0, 0, low)
                continue
            first, last = max(begin, low), min(begin + size, high)
            if first < last:
                yield Piece(place, first - begin, last - first, first)


def flats_of(named: Iterable[tuple[str, Tensor]]) -> list[Flat]:
    """Parameters with their names, as the layout needs to know them."""
    return [Flat(p.numel(), p.dtype, name.rpartition(".")[0] or None) for name, p in named]


def chunks_in(count: int) -> int:
    """The number of chunks of so many elements."""
    return -(-count // CHUNK)


def make_buckets(
    params: Sequence[Flat], world: int, bucket_bytes: float, last_bytes: float | None = None
) -> list[Bucket]:
    """Lay parameters out, in the order given, in buckets of about `bucket_bytes`.

    A bucket is complete with the parameter that fills it. Buckets come in the order in which they
    are complete. With `last_bytes` the last bucket of each dtype is of about this size, and each
    one before it of twice the size of the next, up to `bucket_bytes`; up to four parameters of
    one module stay together.
    """
    grows = last_bytes is not None
    made: dict[torch.dtype, list[list[int]]] = {}
    filled: dict[torch.dtype, int] = {}  # bytes of the last one made
    order = range(len(params))
    for index in reversed(order) if grows else order:
        param = params[index]
        buckets = made.setdefault(param.dtype, [[]])
        limit = bucket_bytes
        if last_bytes is not None:
            limit = min(bucket_bytes, last_bytes * 2 ** (len(buckets) - 1))
        is_full = buckets[-1] and filled[param.dtype] >= limit
        if is_full and not (grows and _stays(param, [params[one] for one in buckets[-1]])):
            buckets.append([])
        before = filled[param.dtype] if buckets[-1] else 0
        filled[param.dtype] = before + param.size * param.dtype.itemsize
        buckets[-1].append(index)
    complete = [sorted(members) for buckets in made.values() for members in buckets]
    complete.sort(key=lambda members: members[-1])
    return [_placed(params, members, world) for members in complete]


def _stays(param: Flat, members: Sequence[Flat]) -> bool:
    """True if a parameter goes into the bucket of those of its module, though this is full."""
    owners = [one.owner for one in members[-TOGETHER:]]
    is_next = param.owner is not None and owners[-1] == param.owner
    return is_next and owners.count(param.owner) < TOGETHER


def _placed(params: Sequence[Flat], members: list[int], world: int) -> Bucket:
    """One bucket.

    A parameter that has a border inside begins a whole number of chunks before it. So up to a chunk
    of memory is left out at each border.
    """
    dtype = params[members[0]].dtype
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
    return Bucket(dtype, places, part * world, part)


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
