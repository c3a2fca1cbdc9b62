"""The loader that torch's iterators see: it begins at a position of an epoch."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.utils.data import IterableDataset, IterDataPipe

from ..order.indices import Indices, batches_of
from ..order.of_sampler import epoch_of, order_of
from ..order.orders import other_epoch
from ..order.stateful import is_stateful, load_map
from ..types import CollateFn, Loader, State, WorkerInitFn
from .batch_states import CollateWithStates, InitWorker
from .skipping import SkippingCollate, SkippingDataset
from .stream import Source


def is_stream(dataset: object) -> bool:
    """True if a dataset is an iterable one whose position can be saved."""
    return isinstance(dataset, IterableDataset) and not isinstance(dataset, IterDataPipe)


def keeps_seed(loader: Loader, state: State) -> bool:
    """True if an iterator with that state has its base seed: torch's persistent workers keep it."""
    goes_on = loader.persistent_workers or not state["_iterator_finished"]
    return goes_on and state["_base_seed"] is not None


def asked_ahead(loader: Loader) -> int:
    """Batches that torch asks its workers for before the first one is delivered."""
    return loader.num_workers * (loader.prefetch_factor or 0)


class LoaderStandIn:
    """Stands in for a DataLoader in the constructor of one of torch's iterators.

    Args:
        loader: the DataLoader.
        state: of an epoch to go on with, or of the end of one; None for a new one.
        has_processes: whether its workers are processes, which send the states of their dataset.
        context: instead of the loader's `multiprocessing_context`.
        ahead: batches that are asked for ahead, besides those of torch's workers.
    """

    collate_fn: CollateFn
    worker_init_fn: WorkerInitFn | None
    pin_memory: bool

    def __init__(
        self,
        loader: Loader,
        state: State | None,
        has_processes: bool = False,
        context: object = None,
        ahead: int = 0,
    ) -> None:
        self._loader = loader
        self.resumes = state is not None and not state["_iterator_finished"]
        self.state: State = state or {}
        self.base_seed: int | None = None  # of the epoch that is resumed
        if state is not None and keeps_seed(loader, state):
            self.base_seed = state["_base_seed"]
            # torch draws a seed, which is not used: not from the loader's generator
            self.generator = torch.Generator()
        if context is not None:
            self.multiprocessing_context = context
        self.saved_workers: list[State] | None = self.state.get("_workers")
        # pickled, as torch would send each tensor to a worker in a file of its own
        packed = None if self.saved_workers is None else [*map(pickle.dumps, self.saved_workers)]
        own = loader._faststep
        every, skips, keeps = own.snapshot_every_n_steps, own.skip_errors, own.keeps_position
        if keeps and is_stream(loader.dataset):
            saved, epoch = self.state.get("_dataset_epoch"), epoch_of(loader.dataset)
            if saved not in (None, epoch):
                raise other_epoch(saved, epoch, "dataset")
            in_workers = loader.num_workers > 0
            self.dataset: Any = Source(loader.dataset, packed, every, in_workers, skips)
        elif not isinstance(loader.dataset, IterableDataset):
            if keeps or order_of(batches_of(loader._index_sampler)) is not None:
                self._index_sampler = self._indices(ahead, every)
            self.dataset = SkippingDataset(loader.dataset) if skips else loader.dataset
        if skips:
            self.collate_fn = SkippingCollate(loader.collate_fn)
        asks = isinstance(self.dataset, Source) or (keeps and is_stateful(loader.dataset))
        self.asks_workers = has_processes and asks
        if self.asks_workers:
            self.collate_fn = CollateWithStates(self.collate_fn, self.dataset)
        if self.asks_workers or (skips and has_processes):
            of_map = None if isinstance(self.dataset, Source) else packed
            self.worker_init_fn = InitWorker(loader.worker_init_fn, self.dataset, of_map)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def _indices(self, ahead: int, every: int | None) -> Indices:
        loader = self._loader
        if loader._faststep.device is not None:
            ahead += loader._faststep.prefetch_to_device + 1
        if loader.num_workers:
            ahead += asked_ahead(loader) + 1
        indices = Indices(loader._index_sampler, ahead, every)
        saved = self.state.get("_sampler_iter_state") or {}
        if self.resumes or "states" in saved:
            indices.state = saved
        if self.resumes:
            indices.delivered = tuple(self.state.get("_beyond", ()))
        # torch's iterator with workers calls `iter` twice for its first epoch
        indices.discards = bool(loader.num_workers) and self.base_seed is not None
        return indices

    def load_into_dataset(self) -> None:
        """Loads the state of a map-style dataset in this process."""
        if self.saved_workers is not None and not isinstance(self.dataset, Source):
            load_map(self._loader.dataset, self.saved_workers[0])
