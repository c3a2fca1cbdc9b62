"""The position in an epoch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

from ..order.stateful import opened
from ..types import State


class Worker(NamedTuple):
    """The position of a worker in a dataset, where only the worker knows it."""

    states: bytes | None = None  # of its dataset, after some batch
    samples: int = 0  # delivered since
    new_epoch: bool = False  # whether the samples are of the epoch after that of the states
    draws: State | None = None  # the random states that the epoch began with
    left: bool = False  # the epoch of the states was left before its end
    # first sample and size of batches that ended in an error; fewer samples may have been read
    failed: tuple[tuple[int, int], ...] = ()

    def after_batch(self, size: int, failed: bool) -> Worker:
        ended = ((self.samples, size),) if failed else ()
        return self._replace(samples=self.samples + size, failed=self.failed + ended)

    def in_next_epoch(self, ended: bool) -> Worker:
        has_states = self.states is not None
        return Worker(self.states, 0, has_states, None, has_states and not ended)


def worker_of(saved: State) -> Worker:
    """The entry of a state about a worker."""
    states = saved.get("states")
    return Worker(
        None if states is None else pickle.dumps(states, pickle.HIGHEST_PROTOCOL),
        saved.get("samples", 0),
        saved.get("new_epoch", False),
        saved.get("draws"),
        saved.get("left", False),
        tuple((start, size) for start, size in saved.get("failed", ())),
    )


def _saved_of(worker: Worker) -> State:
    values = worker._asdict()
    if worker.states is not None:
        values["states"] = opened(worker.states)
    return {key: value for key, value in values.items() if value}


class Progress:
    """The position in an epoch. It outlives the iterator, for `state_dict`.

    Args:
        source: the Order or AskedOrder of the indices; None for an iterable dataset.
        base_seed: of the epoch.
        before: batches delivered before the epoch was resumed; with in_order=False, those before
            the first batch that was not delivered.
    """

    def __init__(self, source: Any, base_seed: int | None, before: int) -> None:
        self.source = source
        self.base_seed = base_seed
        self.before = before
        self.delivered = 0  # batches since
        self.beyond: tuple[int, ...] = ()  # numbers of batches delivered before an earlier one
        self.finished = False
        self.dataset_epoch: int | None = None  # of an iterable dataset
        self.num_workers = 0
        self.workers: list[Worker] | None = None  # None if the number of batches says it all
        self.last_worker = -1
        self.keeps_workers = True  # whether they live on in the next epoch
        # the worker that this process is, after so many batches; the flag is `paced` of `mark`
        self.ask: Callable[[int, bool], Worker] | None = None

    @property
    def count(self) -> int:
        """All batches delivered in the epoch."""
        return self.before + self.delivered + len(self.beyond)

    def mark(self, paced: bool = True) -> Progress:
        """A copy. If `paced`, states may be older, and the samples since are counted."""
        mark = copy.copy(self)
        if self.ask is not None:
            mark.ask, mark.workers = None, [self.ask(self.delivered, paced)]
        elif self.workers is not None:
            mark.workers = list(self.workers)
        return mark

    def go_to(self, mark: Progress) -> None:
        """Sets the position."""
        vars(self).update(vars(mark))

    def state_dict(self) -> State:
        """The position."""
        state: State = {
            "_num_yielded": self.count,
            "_sampler_iter_yielded": self.before + self.delivered,
            "_sampler_iter_state": None,
            "_base_seed": self.base_seed,
            "_iterator_finished": self.finished,
        }
        if self.source is not None:
            state["_sampler_iter_state"] = (
                self.source.finished_state()
                if self.finished
                else self.source.state_after(self.delivered)
            )
        if self.dataset_epoch is not None and not self.finished:
            state["_dataset_epoch"] = self.dataset_epoch
        if self.beyond and not self.finished:
            state["_beyond"] = [number - self.delivered for number in self.beyond]
            state["_batch_size"] = self.source.batch_size
        workers = self.mark(paced=False).workers
        if workers is not None:
            state["_num_workers"] = self.num_workers
            state["_last_worker"] = self.last_worker
            if self.finished:
                workers = [worker.in_next_epoch(True) for worker in workers]
            if not self.finished or (self.keeps_workers and any(w.states for w in workers)):
                state["_workers"] = [_saved_of(worker) for worker in workers]
        return state
