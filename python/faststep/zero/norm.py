"""The global norm: each rank measures its chunks, and all ranks fold the sums of all chunks.

The fold is that of a step of one process (csrc/rules/tree.h), in the order of the parameter groups,
so the norm has the same bits on every rank and for every number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import _C
from .group import Group
from .layout import CHUNK, chunks_in
from .slots import Slot

__all__ = ["ChunkSums", "Measured"]


class Measured(NamedTuple):
    """What all ranks know after the exchange."""

    norm: float  # of the gradients times the inverse scale
    found_inf: bool  # whether an element is infinite or NaN
    present: list[bool]  # whether a parameter has a gradient on every rank, by slot


class ChunkSums:
    """Measures the gradients of the slots, which are given in the order of parameter groups."""

    def __init__(self, slots: Sequence[Slot], group: Group) -> None:
        self._slots = slots
        self._group = group
        self._counts = [chunks_in(slot.param.numel()) for slot in slots]
        self._total = sum(self._counts)
        starts = [0]
        for count in self._counts:
            starts.append(starts[-1] + count)
        self._own: list[tuple[int, int, int]] = []  # slot, piece, chunk
        self._index: list[list[int]] = []
        for number, slot in enumerate(slots):
            chunks: list[int] = []
            for begin, (piece, _) in zip(slot.begins, slot.pieces, strict=True):
                first = starts[number] + begin // CHUNK
                chunks += range(first, first + chunks_in(piece.numel()))
            self._index.append(chunks)

    def measure(self, inv_scale: float) -> Measured:
        """Read this rank's gradients once, and exchange the sums; a collective."""
        present = [slot.is_present for slot in self._slots]
        mine = [number for number, here in enumerate(present) if here and self._index[number]]
        index = [chunk for number in mine for chunk in self._index[number]]
        grads = [grad for number in mine for _, grad in self._slots[number].pieces]
        sums = torch.empty(len(index), dtype=torch.float64)
        found = _C.chunk_squares(grads, inv_scale, sums)
        # Each chunk is measured by one rank, so adding up changes no sum.
        everything = torch.zeros(self._total + len(present) + 1, dtype=torch.float64)
        everything[torch.tensor(index, dtype=torch.int64)] = sums
        everything[self._total : -1] = torch.tensor(present, dtype=torch.float64)
        everything[-1] = float(found)
        self._group.add_up_inside(everything, "adding up the norm")
        if self._group.replicas is not None:  # these have the same sums
            said = everything[self._total :]
            self._group.replicas.add_up(said, "agreeing on an overflow over the replicas")
        agreed = (everything[self._total : -1] == self._group.total).tolist()
        folded = everything[: self._total]
        if not all(agreed):
            wanted = torch.tensor(agreed).repeat_interleave(torch.tensor(self._counts))
            folded = folded[wanted]
        norm = math.sqrt(_C.fold_squares(folded))
        return Measured(norm, bool(everything[-1] != 0), agreed)
