"""Measures of an epoch: waits, bytes and stages, for DataLoader.stats()."""

from __future__ import annotations

import resource
import time
import weakref
from array import array
from collections import UserDict
from typing import Any

import torch

from .._torch.tensors import nbytes_of

KEPT = 4096  # the newest waits, for percentiles
MOST_OBJECTS = 64  # in the containers of a batch whose bytes are counted
ALL_OF, ONE_IN = 8, 64  # the first batches, and one in so many later ones, are looked at


class StageTimes:
    """The waits of one epoch.

    Args:
        iterator: who delivers the batches; looked at when `stats` is called, and not kept alive.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = weakref.ref(iterator)
        self._last_stage = iterator.stage
        self._begun = time.perf_counter_ns()
        self._faults = _page_faults()
        self._totals: dict[str, int] = {}  # of a stage with those within it, in ns
        self._waits = array("q")
        self._batches = self._slowest = self._looked_at = 0
        self._bytes: int | None = 0  # of those that were looked at

    def note(self, iterator: Metered, start: int, batch: object) -> None:
        """A stage, with those within it, has taken from `start` until now for a batch."""
        spent = time.perf_counter_ns() - start
        stage = iterator.stage
        self._totals[stage] = self._totals.get(stage, 0) + spent
        if stage != self._last_stage:
            return
        if self._batches < KEPT:
            self._waits.append(spent)
        else:
            self._waits[self._batches % KEPT] = spent
        count = self._batches = self._batches + 1
        if (count <= ALL_OF or not count % ONE_IN) and self._bytes is not None:
            size = iterator.bytes_of(batch)
            self._bytes = None if size is None else self._bytes + size
            self._looked_at += 1
        if spent > self._slowest:
            self._slowest = spent

    def stats(self) -> dict[str, Any]:
        """See DataLoader.stats."""
        waits = sorted(self._waits)
        size = self._bytes
        if size is not None and self._looked_at:
            size = size * self._batches // self._looked_at
        # stages lie within each other: what is left of one is its own
        totals = sorted(self._totals.items(), key=lambda item: item[1])
        within = [0, *(total for _, total in totals)]
        return {
            "batches": self._batches,
            "bytes": size,
            "seconds": (time.perf_counter_ns() - self._begun) / 1e9,
            "wait": {
                "total": max(within) / 1e9,
                **{f"p{p}": _percentile(waits, p) / 1e9 for p in (50, 95, 99)},
                "max": self._slowest / 1e9,
            },
            "stages": {
                name: (total - before) / 1e9
                for (name, total), before in zip(totals, within, strict=False)
            },
            "queued": _queued(self._iterator()),
            "page_faults": _page_faults() - self._faults,
        }


def _percentile(ordered: list[int], percent: int) -> int:
    """The smallest wait that at least so many of the others do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else 0


def _page_faults() -> int:
    """Minor page faults of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _queued(iterator: object) -> int:
    """Batches that are loaded or being loaded for later."""
    if iterator is None:
        return 0
    names = vars(iterator)
    own: int = names.get("_tasks_outstanding", len(names.get("_queue", ())))
    return own + _queued(names.get("_batches"))


def _bytes_of(batch: Any) -> int | None:
    """The bytes of the tensors in a batch; None where that would take a long look.

    Runs no code of the batch's: what a list, tuple or dict holds is asked of these types
    themselves, also of their subclasses. Nothing else is looked into, but for UserDict's dict.
    """
    if type(batch) is torch.Tensor:
        return nbytes_of(batch)
    total, left, found = 0, MOST_OBJECTS, [batch]
    while found:
        item = found.pop()
        kind = type(item)
        if issubclass(kind, torch.Tensor):
            total += nbytes_of(item)
            continue
        if issubclass(kind, UserDict):
            item = object.__getattribute__(item, "__dict__").get("data")
            kind = type(item)
        of = next((base for base in (tuple, list, dict) if issubclass(kind, base)), None)
        if of is None:
            continue
        left -= of.__len__(item)
        if left < 0:
            return None
        found += dict.values(item) if of is dict else of.__iter__(item)
    return total


class Metered:
    """A base class of iterators that are measured; it comes before one of torch's."""

    stage = "load"
    meter: StageTimes | None = None

    def __next__(self) -> object:
        if self.meter is None:
            return self._next()
        start = time.perf_counter_ns()
        batch = self._next()
        self.meter.note(self, start, batch)
        return batch

    def bytes_of(self, batch: object) -> int | None:
        """Of the newest batch; None if they are not counted."""
        return _bytes_of(batch)

    def _next(self) -> object:
        return super().__next__()  # type: ignore[misc]
