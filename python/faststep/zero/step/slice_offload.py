"""Offload of what a rank owns: its slices are updated in host memory.

The reducer says when gradients are complete, so there are no hooks. The ranks have agreed on the
norm and on an overflow before a step. Parameters are waited for bucket by bucket, as others gather
them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

from torch import Tensor

from ..._torch.optim import increment_version
from ...offloading.offloaded import Offload
from ...offloading.places import fits, mark
from ...optim.base import FusedOptimizer
from ...optim.request import StepRequest
from ..layout.slots import Slot
from ..transport.group import Group


class SliceOffload(Offload):
    """The parts of parameters of one rank."""

    _has_hooks = False

    def __init__(self, optimizer: FusedOptimizer, cores: list[int]) -> None:
        super().__init__(optimizer, cores=cores)
        self._rest: tuple[list[Tensor], StepRequest] | None = None  # of a step, until `finish`
        self._versions: dict[int, int] = {}  # of parameters when their copies were the same

    def follow(self, slots: Iterable[Slot]) -> None:
        """Take in parts that are new, and let C know the copies of all."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._copies.attach(optimizer)
        shards = optimizer._shards or {}
        for values, place in self._copies.places:
            if id(values) in shards:
                shards[id(place.values)] = shards[id(values)]
        for slot in slots:
            self._versions.setdefault(slot.index, slot.param._version)

    def arrived(self, slots: Iterable[Slot]) -> None:
        """Begin to copy the gradients of a bucket, of which the ranks' sums are there."""
        for slot in slots:
            part = slot.part
            place = None if part is None else self._copies.places.of(part.values)
            if part is None or place is None or place.number < 0:
                continue
            place.arrivals = place.arrivals + 1 if slot.held else 1
            if place.arrivals >= place.wanted and fits(place, part.values, part.grad):
                self.bring(place, part.grad)

    def note_writes(self, slots: Iterable[Slot]) -> None:
        """Before a step: note which parameters a script has written; these have own counts."""
        written = [
            slot.part.values
            for slot in slots
            if slot.part and self._versions.get(slot.index) != slot.param._version
        ]
        if written:
            increment_version(written)

    def return_all(self, slots: Iterable[Slot]) -> None:
        """Return when the parts of a bucket are back."""
        parts = [slot.part.values for slot in slots if slot.part is not None]
        places = self._copies.places.of_each(parts)
        self._copies.wait([place.number for place in places if place is not None])

    def _end(self, params: list[Tensor], request: StepRequest) -> None:
        self._rest = params, request

    def finish(self, slots: Iterable[Slot]) -> None:
        """Return when all of a step is done."""
        rest, self._rest = self._rest, None
        if rest is not None:
            super()._end(*rest)
            for param in rest[0]:  # gathering has moved the counters of those on a CUDA device
                if (place := self._copies.places.of(param)) is not None:
                    place.written = mark(param)
            self._versions = {slot.index: slot.param._version for slot in slots}


def cores_of(group: Group) -> list[int]:
    """The share of this rank of the cores that it has with others; a collective."""
    own = sorted(os.sched_getaffinity(0))
    mine = socket.gethostname(), own
    alike = [rank for rank, theirs in enumerate(group.share(mine)) if theirs == mine]
    count = max(1, len(own) // len(alike))
    first = alike.index(group.rank) * count % len(own)
    return own[first : first + count]
