"""Iterable datasets, which a worker reads from its saved position."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain, islice
from typing import Any

from torch.utils.data import get_worker_info

from ..order.draws import generator_of, noting, repeating
from ..order.of_sampler import epoch_of
from ..order.stateful import Pace, begin, is_stateful, items_of, states_of
from ..types import State
from .skipping import SkippingDataset, skipping


def dataset_of(dataset: Any) -> Any:
    """The loader's dataset, of what stands in for it."""
    return dataset.dataset if isinstance(dataset, (Source, SkippingDataset)) else dataset


class Source:
    """Stands in for an iterable dataset. `iter` resumes at the position of the calling worker.

    Args:
        dataset: the iterable dataset.
        saved_workers: what the loader's state has of each worker, pickled; None for a new epoch.
        every: how often states are taken, as in Pace.
        in_workers: whether workers read it, or this process.
        skips: whether samples that raise are skipped.
    """

    def __init__(
        self,
        dataset: Any,
        saved_workers: list[bytes] | None,
        every: int | None,
        in_workers: bool,
        skips: bool = False,
    ) -> None:
        self.dataset = dataset
        self.pace = Pace(every)
        self._every = every
        self._saved_workers = saved_workers
        self._own_state: object = None  # the iterator, if it keeps a state
        self._ended = False
        self._is_fresh = True  # whether the iterator was begun anew, and not asked yet
        self._in_workers = in_workers
        self._skips = skips
        self._is_new = True
        self._seeded = self._is_thread = self._sent = False
        self._draws: State = {"iter": {}, "first": {}}

    def __str__(self) -> str:
        return str(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        saved_workers, self._saved_workers = self._saved_workers, None
        self._seeded, self._is_new = self._in_workers and self._is_new, False
        self._ended = self._sent = False
        self._draws = {"iter": {}, "first": {}}
        if saved_workers is not None:
            info = get_worker_info() if self._in_workers else None
            return self._from(pickle.loads(saved_workers[0 if info is None else info.id]))
        samples = self._begin(None)
        return chain(self._first(samples), samples, self._end())

    def copied(self) -> Source:
        """With a dataset of its own, for a worker that is a thread."""
        arguments = self._saved_workers, self._every, self._in_workers, self._skips
        source = Source(copy.copy(self.dataset), *arguments)
        source._is_thread = True
        return source

    def keeps_state(self) -> bool:
        return is_stateful(self.dataset) or self._own_state is not None

    def states(self) -> State:
        """Of the dataset and its iterator, as they are."""
        ended = None if self._is_fresh else self._ended
        return states_of(self.dataset, self._own_state, ended)

    def draws(self) -> State:
        """The random states that this epoch began with, of what it has drawn from."""
        return {key: noted for key, noted in self._draws.items() if noted}

    def new_draws(self) -> State:
        """In a worker, for its first batch: `draws`, if its seed does not lead to them."""
        sent, self._sent = self._sent, True
        return {} if sent or self._seeded or self.keeps_state() else self.draws()

    def _begin(self, states: State | None) -> Iterator[object]:
        """The samples of an iterator of the dataset, from where it had the states."""
        self._is_fresh = states is None or states["ended"] is None
        with self._drawing("iter"):
            iterator = begin(self.dataset, states)
        if iterator is None:
            self._ended = True
            return iter(())
        self._own_state = iterator if is_stateful(iterator) else None
        return skipping(items_of(iterator)) if self._skips else items_of(iterator)

    def _first(self, samples: Iterator[object]) -> Iterator[object]:
        """The first sample: many datasets draw their order for it."""
        self._is_fresh = False
        with self._drawing("first"):
            first = [*islice(samples, 1)]
        while first:
            yield first.pop()  # the generator keeps no reference to it

    def _end(self) -> Iterator[object]:
        self._ended = True
        yield from ()

    def _drawing(self, when: str) -> AbstractContextManager[None]:
        noted, own = self._draws[when], generator_of(self.dataset)
        if noted:
            return self._repeating(noted)
        # an order that follows from the worker's seed is drawn again as it was
        return nullcontext() if self._seeded or self._is_thread else noting(noted, own)

    def _repeating(self, noted: State) -> AbstractContextManager[None]:
        if self._is_thread or (self._seeded and not noted):
            return nullcontext()
        return repeating(noted, generator_of(self.dataset), put_back=not self._in_workers)

    def _from(self, saved: State) -> Iterator[object]:
        self._draws.update({key: dict(noted) for key, noted in saved.get("draws", {}).items()})
        epoch = epoch_of(self.dataset)
        samples = self._begin(saved.get("states"))
        if saved.get("new_epoch", False):
            if not saved.get("left", False):
                deque(samples, maxlen=0)  # read to its end: some datasets begin anew only then
            self._ended = False
            self._draws = {"iter": {}, "first": {}}
            if epoch != epoch_of(self.dataset):  # it was set after the state of the epoch before
                self.dataset.set_epoch(epoch)
            samples = self._begin(None)
        count, failed = saved.get("samples", 0), saved.get("failed", ())
        return chain(self._skipping(samples, count, failed), samples, self._end())

    def _skipping(
        self, samples: Iterator[object], count: int, failed: Iterable[tuple[int, int]]
    ) -> Iterator[object]:
        """Reads and drops what was delivered before, as far as an error let it be read."""
        if not count:
            yield from self._first(samples)
            return
        self._is_fresh = False
        with self._repeating(self._draws["first"]):
            at = 0
            for start, size in failed:
                deque(islice(samples, start - at), maxlen=0)
                with suppress(Exception):  # it was raised in the place of this batch
                    deque(islice(samples, size), maxlen=0)
                at = start + size
            deque(islice(samples, count - at), maxlen=0)
