"""The choice of an iterator for a loader with workers, if its dataset is not in arrays."""

from __future__ import annotations

import os
from typing import Any

from ..stats import BatchStage
from ..types import Loader, State
from .arena import ArenaPool
from .processes import ProcessIterator
from .threads import ThreadIterator

__all__ = ["Workers", "is_of_parent"]


def is_of_parent(iterator: Any) -> bool:
    """True if the workers of an iterator stayed with the process that was forked."""
    batches = iterator
    while isinstance(batches, BatchStage):
        batches = batches._batches
    ours = isinstance(batches, (ProcessIterator, ThreadIterator))
    return ours and batches._process != os.getpid()


class Workers:
    """The tools that a loader keeps for its workers from epoch to epoch."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._pool = ArenaPool()
        self.reason: str | None = None  # why torch's own iterator has to do it

    def iterator(
        self, loader: Loader, state: State | None = None
    ) -> ProcessIterator | ThreadIterator | None:
        """A new iterator, with a state one that goes on; None if torch's own has to do it."""
        loader.check_worker_number_rationality()
        if self._method == "thread":
            return ThreadIterator(loader, state)
        try:
            self._pool.prepare()
        except MemoryError as error:
            self.reason = str(error)
            return None
        self.reason = None
        return ProcessIterator(loader, self._pool, state)

    @property
    def path(self) -> str:
        if self._method == "thread":
            return "threads"
        return "workers" if self.reason is None else "torch"

    def slots(self) -> dict[str, int] | None:
        """How many blocks of memory there are for the newest iterator; None if it has none."""
        counts = self._pool.counts()
        return counts and {key: counts[key] for key in ("made", "free", "taken", "held")}

    def explain(self) -> str:
        if self._method == "thread":
            return "threads fetch and collate the samples"
        if self.reason is not None:
            return f"torch's own iterator loads the batches: {self.reason}"
        return self._pool.explain()
