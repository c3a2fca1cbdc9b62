"""What a tensor of this rank is of a whole parameter, whose elements states in codes, and the noise
of stochastic rounding, count."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._torch.dtensor import any_dtensor, is_dtensor, spec_of, specs_of
from ..grads.owners import releasing
from ..grads.params import described, params_of
from .state_kinds import Kinded, all_kinds, kinds_in

BLOCK, CHUNK = 64, 16384  # elements; csrc/rules/codes.h and csrc/base/work.h


class Shard(NamedTuple):
    """Elements in the order of memory. C reads it by position."""

    number: int  # of the parameter, among all of the optimizer
    begin: int  # the first element
    row: int  # elements of a row of dimension 0, where blocks of codes end with it, else 0
    coded: bool  # the states are in codes


Shards = dict[int, Shard]  # by id() of the tensors; C looks there too


class Sharded(Kinded, Protocol):
    """An optimizer that may have shards."""

    _shards: Shards | None
    _divided_shards: tuple[list[Tensor], list[Any], Shards] | None


def row_of(value: Tensor) -> int:
    """Elements of a row of dimension 0 where blocks end with them, else 0."""
    if value.dim() == 0 or value.shape[0] < 2:
        return 0
    row = value.numel() // value.shape[0]
    ends = value.stride(0) == row and row > BLOCK and row % BLOCK
    return row if ends and row < 2**32 else 0


def shards_of(optimizer: Sharded) -> Shards | None:
    """The parts that an optimizer has of its parameters; None where all are whole, or none counts
    elements.

    Raises:
        RuntimeError: a parameter is divided along another dimension than 0.
    """
    if optimizer._shards is not None:
        return optimizer._shards
    kinds = all_kinds(optimizer)
    if not any(one.codes_from or one.is_noisy for one in kinds):
        return None
    params = params_of(optimizer)
    whole: Any = optimizer
    if not any_dtensor(params) and whole not in releasing:  # which steps each parameter alone
        return None
    specs, known = specs_of(params), optimizer._divided_shards
    if known is None or not are_same(params, known[0]) or not are_same(specs, known[1]):
        known = optimizer._divided_shards = params, specs, _divided(optimizer, params)
    return known[2]


def are_same(now: list[Any], before: list[Any]) -> bool:
    """True if two lists have the same objects."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def shard_of(optimizer: Any, param: Tensor) -> Shard | None:
    """What an optimizer has of one of its parameters; None for all of it."""
    return (shards_of(optimizer) or {}).get(id(param))


def has_codes(smallest: int, shards: Shards | None, param: Tensor) -> bool:
    """True if states of a parameter are in codes where those from so many elements on are."""
    shard = None if shards is None else shards.get(id(param))
    if shard is not None:
        return shard.coded
    return 0 < smallest <= param.numel() and param.is_floating_point()


def _divided(optimizer: Sharded, params: list[Tensor]) -> Shards:
    shards = {}
    places = (
        (number, index)
        for number, group in enumerate(optimizer.param_groups)
        for index in range(len(group["params"]))
    )
    kinds = [kinds_in(optimizer, group) for group in optimizer.param_groups]
    for number, (param, place) in enumerate(zip(params, places, strict=True)):
        own = kinds[place[0]]
        whole = has_codes(own.codes_from, None, param)
        if not is_dtensor(param):
            like = torch.empty_like(param, device="meta")  # without gaps
            shards[id(param)] = Shard(number, 0, row_of(like), whole)
        else:
            cut = _cut_of(param)
            if cut is None:
                where, placements = described(optimizer, *place), spec_of(param).placements
                raise RuntimeError(
                    f"{type(optimizer).__name__}: {where} has the placements {placements}, and "
                    "states in int8, as stochastic rounding, are for parameters that are divided "
                    "along dimension 0; nothing was updated"
                )
            begin, edges = cut
            row = row_of(param)
            coded = whole and (row > 0 or all(edge % BLOCK == 0 for edge in edges))
            counts = coded or own.is_noisy
            shards[id(param)] = Shard(number, begin if counts else 0, row, coded)
    return shards


def _cut_of(param: Any) -> tuple[int, list[int]] | None:
    """The first element of this rank's part, and where parts of all ranks begin; None if parts are
    no ranges of elements."""
    spec, sizes = spec_of(param), list(param.shape)
    ranges = [(0, sizes[0] if sizes else 1)]
    begin, rows = ranges[0]
    for dim, placement in enumerate(spec.placements):
        if placement.is_replicate() or spec.mesh.size(dim) == 1:
            continue
        if type(placement).__name__ != "Shard" or placement.dim != 0 or not param.is_contiguous():
            return None
        ranks = spec.mesh.size(dim)
        mine = spec.mesh.get_local_rank(dim)
        begin, rows = list(_cuts(begin, rows, ranks))[mine]
        ranges = [cut for one in ranges for cut in _cuts(*one, ranks)]
    row = param.numel() // sizes[0] if sizes and sizes[0] else 1
    begin = begin if rows else 0  # a part without elements begins nowhere
    return begin * row, [first * row for first, count in ranges if count]


def _cuts(begin: int, rows: int, ranks: int) -> Iterator[tuple[int, int]]:
    """The rows of each rank, as torch divides them."""
    size = -(-rows // ranks)
    for rank in range(ranks):
        first = min(rank * size, rows)
        yield begin + first, min(size, rows - first)
