"""The states of datasets in worker processes, which travel with the batches."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from ..._torch.data_loader import pin_memory, set_worker_dataset
from ..order.stateful import is_stateful, load_map, snapshot, states_of
from ..types import CollateFn, WorkerInitFn
from .stream import Source, dataset_of


@dataclass(eq=False)
class BatchWithStates:
    """A batch on its way from a worker, with the position that only the worker knows.

    Args:
        states: the states of dataset and iterator after this batch, pickled; None if none were
            taken at this batch.
        draws: the states of random generators at the epoch's beginning, pickled; None if they were
            sent before.
    """

    batch: object
    states: bytes | None
    draws: bytes | None

    def pin_memory(self, device: str | None = None) -> BatchWithStates:
        """Torch's thread that pins batches calls it."""
        return BatchWithStates(pin_memory(self.batch, device), self.states, self.draws)


class CollateWithStates:
    """The collate function of a worker, whose batches leave with states if its dataset keeps any.

    Args:
        collate_fn: the loader's.
        dataset: a Source, or a map-style dataset.
    """

    def __init__(self, collate_fn: CollateFn, dataset: object) -> None:
        self._collate_fn = collate_fn
        self._dataset = dataset if isinstance(dataset, Source) else dataset_of(dataset)
        self._has_sent = False

    def __call__(self, samples: object) -> object:
        batch = self._collate_fn(samples)
        source = self._dataset if isinstance(self._dataset, Source) else None
        if not (source.keeps_state() if source else is_stateful(self._dataset)):
            draws = source.new_draws() if source else {}
            return BatchWithStates(batch, None, pickle.dumps(draws)) if draws else batch
        if source is None:  # each time, as indices cannot be read again
            return BatchWithStates(
                batch, snapshot(lambda: states_of(self._dataset, None, False)), None
            )
        is_due = source.pace.is_due()  # counts
        if not is_due and self._has_sent:
            return batch
        self._has_sent = True  # the first one always, so that epochs can be told apart
        return BatchWithStates(batch, source.pace.take(source.states), None)


@dataclass(eq=False)
class InitWorker:
    """Run in a worker process before it reads: the loader's worker_init_fn, and our own.

    Args:
        init_fn: the loader's.
        dataset: a Source, or a map-style dataset.
        saved_workers: where the workers of a map-style dataset go on, each pickled.
    """

    init_fn: WorkerInitFn | None
    dataset: object
    saved_workers: list[bytes] | None

    def __call__(self, worker: int) -> None:
        dataset = dataset_of(self.dataset)
        if dataset is not self.dataset:
            set_worker_dataset(dataset)
        if self.init_fn is not None:
            self.init_fn(worker)
        if self.saved_workers is not None:
            load_map(dataset, pickle.loads(self.saved_workers[worker]))
