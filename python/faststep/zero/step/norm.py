"""The global norm: each rank measures its chunks, and all ranks fold the sums of all chunks.

The fold is that of a step of one process (csrc/rules/tree.h), in the order of the parameter groups,
so the norm has the same bits on every rank and for every number of ranks.

Nothing here waits for a CUDA device. So ranks cannot ask each other first which gradients are
there. They exchange a number made of that beside the sums.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import chain, compress
from typing import NamedTuple

import torch
from torch import Tensor

from ... import _C
from ..._devices import ordinal_of
from ...optim.param_shards import CHUNK
from ...optim.plan_step import on_device
from ..layout.cuts import chunks_in
from ..layout.slots import Slot
from ..transport.group import Group

MOST_CODES = 2**13  # squares of sums of so many are exact in float64 for up to 8192 ranks
MOST_KEPT = 64  # sets of gradients whose places are remembered


class Measured(NamedTuple):
    """The knowledge of all ranks after the exchange, in tensors without dimensions."""

    norm: Tensor  # float64, of the gradients divided by the scale
    found_inf: Tensor  # float32, 1 where an element is infinite or NaN
    differ: Tensor  # float32, 1 where not all ranks have gradients of the same parameters


class _Places(NamedTuple):
    """The numbers exchanged for a set of gradients, uploaded once: that waits for a CUDA device."""

    own: Tensor  # the places of this rank's chunks among all
    folded: Tensor  # the places of all ranks' chunks
    code: Tensor  # a number that tells which gradients they are, and its square


class ChunkSums:
    """Measures the gradients of the slots, which are given in the order of parameter groups."""

    def __init__(self, slots: Sequence[Slot], group: Group) -> None:
        self._slots = slots
        self._group = group
        self._all: list[Sequence[int]] = []  # the chunks of each slot
        self._own: list[Sequence[int]] = []  # and those of this rank
        first = 0
        for slot in slots:
            chunks = range(first, first + chunks_in(slot.param.numel()))
            self._all.append(chunks)
            part = slot.part
            own = chunks[part.begin // CHUNK :][: chunks_in(part.grad.numel())] if part else ()
            self._own.append(own)
            first = chunks.stop
        self._total = first
        self._places: dict[tuple[bool, ...], _Places] = {}

    def measure(self, present: Sequence[bool], grad_scale: Tensor | None = None) -> Measured:
        """Read this rank's gradients once, and exchange the sums; a collective.

        `present` says of each slot whether its gradient is there. `grad_scale`, 0-d, divides them.
        """
        places, device = self._places_of(tuple(present)), self._group.device
        grads = [slot.part.grad for slot in compress(self._slots, present) if slot.part]
        # Each chunk is measured by one rank, so adding up changes no sum.
        everything = torch.zeros(self._total + 3, dtype=torch.float64, device=device)
        sums, said = everything[: self._total], everything[self._total :]
        own = torch.zeros(places.own.numel(), dtype=torch.float64, device=device)
        said[0].copy_(_measure(grads, grad_scale, own))
        said[1:].copy_(places.code)
        sums.index_copy_(0, places.own, own)
        self._group.add_up_inside(everything, "adding up the norm")
        if self._group.replicas is not None:  # these have the same sums
            self._group.replicas.add_up(said, "agreeing on an overflow over the replicas")
        folded = sums.index_select(0, places.folded)
        norm = _fold(folded)
        differ = said[2] * self._group.total != said[1] * said[1]
        return Measured(norm, (said[0] != 0.0).float(), differ.float())

    def _places_of(self, present: tuple[bool, ...]) -> _Places:
        if present not in self._places:
            if len(self._places) == MOST_KEPT:
                self._places.clear()
            device = self._group.device
            own, folded = (
                torch.tensor([*chain(*compress(of, present))], dtype=torch.int64, device=device)
                for of in (self._own, self._all)
            )
            code = zlib.crc32(bytes(present)) % MOST_CODES
            codes = torch.tensor([code, code * code], dtype=torch.float64, device=device)
            self._places[present] = _Places(own, folded, codes)
        return self._places[present]


def _measure(grads: list[Tensor], grad_scale: Tensor | None, sums: Tensor) -> Tensor:
    """Write the chunks' sums of squares; returns 1 where an element is infinite or NaN."""
    found = torch.zeros((), dtype=torch.float32, device=sums.device)
    scale = on_device(grad_scale, ordinal_of(sums))
    if grads and sums.is_cpu:
        inverse = 1.0
        if scale is not None:  # rounded as a step of one process rounds it
            dtype = torch.promote_types(scale.dtype, torch.float32)
            inverse = torch.tensor(1.0 / float(scale), dtype=dtype).item()
        found.fill_(_C.chunk_squares(grads, inverse, sums))
    elif grads:
        _C.device_chunk_squares(grads, scale, sums, found)
    return found


def _fold(sums: Tensor) -> Tensor:
    norm = torch.zeros((), dtype=torch.float64, device=sums.device)
    if sums.is_cpu:
        norm.fill_(math.sqrt(_C.fold_squares(sums)))
    elif sums.numel():
        _C.device_fold_squares(sums, norm)
    return norm
