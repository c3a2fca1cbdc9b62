"""torch's iterators, extended: they know their position in an epoch and can resume."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback
from typing import Any

from torch.utils.data import IterDataPipe

from .. import _C
from .._torch.data_loader import (
    ExceptionWrapper,
    MultiProcessingDataLoaderIter,
    SingleProcessDataLoaderIter,
    next_as_torch,
    profile_name,
)
from .deliver.batch_buffers import buffering_by, buffering_collate
from .order.asked import AskedOrder
from .order.indices import Indices
from .order.of_sampler import epoch_of
from .order.stateful import is_stateful, snapshot, states_of
from .resume.batch_states import BatchWithStates
from .resume.epochs import EpochListener
from .resume.loader_stand_in import LoaderStandIn
from .resume.progress import Progress, Worker, worker_of
from .resume.stream import Source, dataset_of
from .stats import Metered
from .types import Loader, State


class Placed(Metered):
    """A base class before one of torch's iterators: it keeps the position in the epoch.

    Args:
        stand_in: of the DataLoader.
    """

    progress: Progress
    _num_workers: int
    _persistent_workers: bool
    _index_sampler: object
    _dataset: Any
    _num_yielded: int
    _IterableDataset_len_called: Any
    _next_data: Any

    def __init__(self, stand_in: LoaderStandIn) -> None:
        self._kept_seed = stand_in.base_seed
        self._keeps_position = stand_in._faststep.keeps_position
        self._samples = stand_in.batch_size or 1  # in a batch of an iterable dataset
        super().__init__(stand_in)  # type: ignore[call-arg]
        self._profile_name = profile_name(self._num_workers)
        if isinstance(self._index_sampler, Indices):
            self._index_sampler.state = None  # for epochs to come
            self._index_sampler.delivered = ()
        self._begin(stand_in.state if stand_in.resumes else {}, stand_in.saved_workers)

    def _next(self) -> object:
        if _C.is_recorded() or self._IterableDataset_len_called is not None:
            return next_as_torch(self)  # under its name in profiles; it warns of a wrong length
        data = self._next_data()
        self._num_yielded += 1
        return data

    @property
    def _base_seed(self) -> Any:
        return self._seed

    @_base_seed.setter
    def _base_seed(self, drawn: object) -> None:
        self._seed = drawn if self._kept_seed is None else self._kept_seed

    def _begin(self, state: State, saved_workers: list[State] | None) -> None:
        """Notes that an epoch begins, or goes on with a state."""
        source = self._index_sampler.source if isinstance(self._index_sampler, Indices) else None
        progress = Progress(source, int(self._base_seed), state.get("_sampler_iter_yielded", 0))
        progress.beyond = tuple(state.get("_beyond", ()))
        if isinstance(self._dataset, Source):
            progress.dataset_epoch = epoch_of(self._dataset.dataset)
        progress.num_workers = self._num_workers
        progress.keeps_workers = self._persistent_workers or not self._num_workers
        progress.last_worker = state.get("_last_worker", -1)
        self.progress = progress
        self._num_yielded = progress.count


class SingleIterator(Placed, SingleProcessDataLoaderIter):
    """torch's iterator without workers; datasets that make whole batches get memory for them.

    Args:
        loader: the DataLoader.
        state: of an epoch to go on with, or of the end of one; None for a new one.
    """

    def __init__(self, loader: Loader, state: State | None = None) -> None:
        stand_in = LoaderStandIn(loader, state)
        stand_in.load_into_dataset()
        self._buffers = buffering_collate(loader)
        if self._buffers is not None:
            stand_in.collate_fn = self._buffers
        super().__init__(stand_in)

    def _begin(self, state: State, saved_workers: list[State] | None) -> None:
        super()._begin(state, saved_workers)
        self._drawn = None
        if isinstance(self._index_sampler, Indices):
            self._drawn = self._index_sampler.drawn
        if isinstance(self._dataset, Source):
            begun = worker_of(saved_workers[0]) if state and saved_workers else None
            self.progress.ask = _PlaceInStream(self._dataset, begun, self._samples)
        elif self._keeps_position and is_stateful(dataset_of(self._dataset)):
            dataset = dataset_of(self._dataset)
            self.progress.ask = lambda *_: Worker(snapshot(lambda: states_of(dataset, None, False)))

    def _next_data(self) -> Any:
        progress = self.progress
        try:
            with buffering_by(self._buffers):
                return super()._next_data()
        except StopIteration:
            progress.finished = True
            raise
        except Exception:
            if isinstance(progress.ask, _PlaceInStream):
                progress.ask.failed.append(progress.delivered)
            raise
        finally:
            if self._drawn is None:
                progress.delivered += not progress.finished
            else:  # a batch whose samples cannot be read is lost
                progress.delivered = self._drawn.position
                if progress.beyond:
                    progress.beyond = tuple(n for n in progress.beyond if n >= progress.delivered)


class _PlaceInStream:
    """Says where this process is in an iterable dataset.

    Args:
        source: stands for the dataset.
        begun: where the epoch was taken up again; None for a new one.
        samples: in a batch.
    """

    def __init__(self, source: Source, begun: Worker | None, samples: int) -> None:
        self._source = source
        self._begun = begun
        self._samples = samples
        self._newest: tuple[int, Worker] | None = None
        self.failed: list[int] = []  # batches since it began in whose place an error came

    def __call__(self, batches: int, paced: bool) -> Worker:
        source = self._source
        if not batches and self._begun is not None:
            return self._begun  # the samples before were not read again yet
        if not source.keeps_state():
            begun = self._begun or Worker()
            return self._later(begun._replace(draws=source.draws()), 0, batches)
        if self._newest is not None and paced and not source.pace.is_due():
            number, worker = self._newest
            return self._later(worker, number, batches)
        self._newest = batches, Worker(source.pace.take(source.states))
        return self._newest[1]

    def _later(self, worker: Worker, begin: int, end: int) -> Worker:
        """A worker that was at batch `begin`, at another one."""
        size, at = self._samples, worker.samples
        failed = tuple((at + size * (n - begin), size) for n in self.failed if begin <= n < end)
        samples = at + size * (end - begin)
        return worker._replace(samples=samples, failed=worker.failed + failed)


class PlacedWorkers(Placed):
    """A base class before torch's iterator with workers: it keeps the position of each worker."""

    _in_order: bool
    _send_idx: int
    _task_info: dict[int, object]
    _worker_queue_idx_cycle: Any
    _shutdown = True  # until torch's constructor sets it; it may fail before
    _workers: Any = ()
    _epochs: EpochListener | None = None

    def __init__(self, stand_in: LoaderStandIn) -> None:
        self._asks_workers = stand_in.asks_workers or isinstance(stand_in.dataset, Source)
        own = stand_in._faststep
        self._lag = 0 if own.device is None else own.prefetch_to_device + 1
        self._turns = 0  # of workers, in this round, that were served before the state was saved
        if stand_in.resumes:
            last = stand_in.state.get("_last_worker", -1)
            is_map = isinstance(stand_in._index_sampler, Indices)
            place = stand_in.state["_sampler_iter_yielded"] if is_map else last + 1
            self._turns = place % stand_in.num_workers
        early = not stand_in.in_order or stand_in.state.get("_beyond")
        if early and isinstance(stand_in._index_sampler, Indices):
            stand_in._index_sampler.ahead = sys.maxsize  # the oldest batch may come last
        if "numpy" in sys.modules:  # each worker thread would import it, all at the same time
            importlib.import_module("numpy.random")
        super().__init__(stand_in)
        is_pipe = isinstance(self._dataset, IterDataPipe)
        if self._persistent_workers and self._keeps_position and not is_pipe:
            self._epochs = EpochListener(dataset_of(self._dataset))

    def _begin(self, state: State, saved_workers: list[State] | None) -> None:
        super()._begin(state, saved_workers)
        self._left_out = self.progress.beyond
        if self._asks_workers:
            all_saved = saved_workers or [{}] * self._num_workers
            self.progress.workers = [worker_of(saved) for saved in all_saved]

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        if self._epochs is not None:
            self._shared_seed = self._epochs.take()  # what torch sends to each worker now
        super()._reset(loader, first_iter)  # type: ignore[misc]
        if not first_iter:
            workers, ended = self.progress.workers, self.progress.finished
            self._begin({}, None)
            if workers is not None:
                self.progress.workers = [worker.in_next_epoch(ended) for worker in workers]

    def _next_data(self) -> Any:
        try:
            return super()._next_data()
        except StopIteration:
            self.progress.finished = True
            raise

    def _try_put_index(self) -> None:
        turns, self._turns = self._turns, 0
        for _ in range(turns):
            next(self._worker_queue_idx_cycle)
        super()._try_put_index()  # type: ignore[misc]

    def _process_data(self, data: Any, worker: int) -> Any:
        states, draws = None, None
        if isinstance(data, BatchWithStates):
            data, states, draws = data.batch, data.states, data.draws
        self._count(worker, states, draws, isinstance(data, ExceptionWrapper))
        return super()._process_data(data, worker)  # type: ignore[misc]

    def _count(self, worker: int, states: bytes | None, draws: bytes | None, failed: bool) -> None:
        """A batch of a worker, or the error in its place, is about to be delivered."""
        progress = self.progress
        progress.last_worker = worker
        if progress.workers is not None:
            before = progress.workers[worker]
            if states is None:
                after = before.after_batch(self._samples, failed)
                if draws is not None:
                    after = after._replace(draws=pickle.loads(draws))
            else:
                after = Worker(states)
            progress.workers[worker] = after
        if isinstance(self._index_sampler, Indices) and (self._left_out or not self._in_order):
            self._count_out_of_order()
        else:
            progress.delivered += 1

    def _count_out_of_order(self) -> None:
        waiting, progress = self._task_info, self.progress
        first = next(iter(waiting), self._send_idx)
        progress.delivered = self._number_of(first)
        done = {self._number_of(task) for task in range(first, self._send_idx)}
        done -= {self._number_of(task) for task in waiting}
        done.update(number for number in self._left_out if number > progress.delivered)
        progress.beyond = tuple(sorted(done))
        if isinstance(progress.source, AskedOrder):
            progress.source.forget(progress.delivered - self._lag)

    def _number_of(self, task: int) -> int:
        """The number of a task's batch, where some were delivered before."""
        for number in self._left_out:
            if number <= task:
                task += 1
        return task


class OwnWorkers(PlacedWorkers, MultiProcessingDataLoaderIter):
    """torch's iterator with workers of ours, which stay with the process that made them."""

    refusal: str  # to a forked child
    _process = 0  # until the constructor sets it; another one may fail before

    def __init__(self, stand_in: LoaderStandIn) -> None:
        self._process = os.getpid()
        super().__init__(stand_in)

    def _next_data(self) -> Any:
        if self._process != os.getpid():
            raise RuntimeError(f"{self.refusal}; iterate over the DataLoader anew in the child")
        try:
            return super()._next_data()
        except BaseException as error:
            # A frame that raises a variable is in a cycle with it and with this iterator: when that
            # is collected its queues go first, and its workers are not told to end.
            traceback.clear_frames(error.__traceback__)
            raise

    def _shutdown_workers(self) -> None:
        """Ends the workers; a forked child leaves them to its parent."""
        if self._process == os.getpid():
            super()._shutdown_workers()


class MultiIterator(PlacedWorkers, MultiProcessingDataLoaderIter):
    """torch's iterator with worker processes.

    Args:
        loader, state: as of SingleIterator.
    """

    def __init__(self, loader: Loader, state: State | None = None) -> None:
        super().__init__(LoaderStandIn(loader, state, has_processes=True))
