"""The iterator that tells what was left out of batches, and leaves out those that are empty."""

from __future__ import annotations

import warnings
from typing import Any

from ..resume.progress import EpochIterator
from ..resume.skipping import BatchWithSkipped
from ..stats import BatchStage
from ..types import Loader, State

__all__ = ["LeavingOut"]

NAMED = 100  # samples that stats() names


class LeavingOut(BatchStage):
    """Delivers what is left of another iterator's batches, and warns of an epoch's first sample.

    Args:
        iterator: the other one.
        counts: gets what DataLoader.stats() has of skipped samples.
    """

    stage = "skip"

    def __init__(self, iterator: EpochIterator, counts: State) -> None:
        self._batches: EpochIterator = iterator
        self._counts = counts
        self._begin()

    def _begin(self) -> None:
        self._counts.update(samples=0, batches=0, named=[])

    def __getattr__(self, name: str) -> Any:
        if name in ("progress", "_base_seed", "_pin_memory", "_pin_memory_device"):
            return getattr(self._batches, name)
        raise AttributeError(name)

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        """Starts the next epoch; a DataLoader with persistent workers calls it."""
        self._batches._reset(loader, first_iter)
        self._begin()

    def _next(self) -> object:
        while isinstance(batch := next(self._batches), BatchWithSkipped):
            self._note(batch)
            if not batch.is_empty:
                return batch.batch
        return batch

    def _note(self, batch: BatchWithSkipped) -> None:
        counts, first = self._counts, batch.skipped[0]
        counts["samples"] += len(batch.skipped)
        counts["batches"] += batch.is_empty
        counts["named"] += map(dict, batch.skipped[: NAMED - len(counts["named"])])
        if counts["samples"] == len(batch.skipped):
            of_worker = "" if first["worker"] is None else f" of worker {first['worker']}"
            warnings.warn(
                f"skip_errors: sample {first['index']}{of_worker} is left out: {first['error']}. "
                "stats() of the DataLoader has the others of this epoch",
                stacklevel=4,
            )
