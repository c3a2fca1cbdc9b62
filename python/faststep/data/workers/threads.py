"""torch's iterator over workers, with threads in the place of the processes."""

from __future__ import annotations

import copy
import inspect
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ..._torch.data_loader import (
    ExceptionWrapper,
    IterableEnded,
    ResumeIteration,
    collates_as_default,
    dataset_kind_fetcher,
    dataset_of_worker,
    new_worker_info,
    worker_info_of_thread,
)
from ..at_exit import close_at_exit
from ..deliver.batch_buffers import BatchBuffers, buffering_by, buffering_collate
from ..plain import OwnWorkers
from ..resume.batch_states import CollateWithStates
from ..resume.loader_stand_in import LoaderStandIn
from ..resume.skipping import SkippingCollate
from ..resume.stream import Source, dataset_of
from ..types import CollateFn, Loader, State


class ThreadIterator(OwnWorkers):
    """torch's iterator with threads for workers. Order, draws, errors and time-outs are torch's.

    The threads share the dataset; an iterable one is copied (`copy.copy`) for each of them. Nothing
    else is pickled or copied, and `get_worker_info()` in a thread is about that thread. The global
    random generators are shared too, and not seeded: what a sample draws from them depends on
    timing.

    Args:
        loader: the DataLoader.
        state: of an epoch to go on with, or of the end of one; None for a new one.
    """

    refusal = "the threads of this iterator stayed in the process that was forked"

    def __init__(self, loader: Loader, state: State | None = None) -> None:
        stand_in = LoaderStandIn(loader, state, context=_Context)
        stand_in.collate_fn = buffering_collate(loader) or stand_in.collate_fn
        threads = torch.get_num_threads()
        try:
            super().__init__(stand_in)
        finally:
            torch.set_num_threads(threads)  # a worker set it for itself, and for threads to come
        close_at_exit(self)


class _Queue(queue.Queue[Any]):
    """With the methods that a queue between processes has."""

    def cancel_join_thread(self) -> None:
        """Nothing to do: no thread feeds it."""

    def close(self) -> None:
        """Nothing to do: it ends with its last reference."""


class _Worker:
    """A thread that can be handled like a process.

    Args:
        target: torch's function for a worker process, which gives `args` their names.
    """

    def __init__(self, target: Callable[..., object], args: tuple[object, ...]) -> None:
        arguments = inspect.signature(target).bind(*args).arguments
        self._ready = threading.Event()
        name = f"faststep-worker-{arguments['worker_id']}"
        self._thread = threading.Thread(
            target=_run, args=(arguments, self._ready), name=name, daemon=True
        )
        self.pid = os.getpid()  # torch looks for dead children among these: this is none
        self.daemon = True

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def terminate(self) -> None:
        """Nothing can end a thread from outside; it ends after the sample that it is at."""


class _Context:
    Queue = _Queue
    Event = threading.Event
    Process = _Worker


def _run(arguments: State, ready: threading.Event) -> None:
    """Do in a thread the work of torch's worker processes."""
    torch.get_num_threads()  # the first call in a thread sets the process's number
    torch.set_num_threads(1)
    ready.set()
    worker = arguments["worker_id"]
    dataset = dataset_of_worker(arguments)
    if isinstance(dataset, Source):
        dataset = dataset.copied()
    elif isinstance(dataset, IterableDataset):
        dataset = copy.copy(dataset)
    seed = arguments["base_seed"] + worker
    info = new_worker_info(worker, arguments["num_workers"], seed, dataset_of(dataset))
    with worker_info_of_thread(info):
        _Loop(arguments, dataset).run()


class _Loop:
    """A worker's loop: takes indices, and puts batches or errors."""

    def __init__(self, arguments: State, dataset: object) -> None:
        self._arguments = arguments
        self._dataset = dataset
        self._worker = arguments["worker_id"]
        self._collate_fn = arguments["collate_fn"]
        own = self._collate_fn
        own = own.collate_fn if isinstance(own, SkippingCollate) else own
        self._buffers: BatchBuffers | None = None
        if isinstance(self._collate_fn, BatchBuffers):
            self._buffers = BatchBuffers(self._collate_fn.take)  # of this thread
            self._collate_fn = _hiding_the_worker(self._buffers)
        elif collates_as_default(own, ()):
            self._collate_fn = _hiding_the_worker(self._collate_fn)
        if isinstance(dataset, Source):
            self._collate_fn = CollateWithStates(self._collate_fn, dataset)
        self._fetcher: Any  # once it has started without a failure
        self._failure: object = None  # at the start: it stands for every batch

    def run(self) -> None:
        tasks, results = self._arguments["index_queue"], self._arguments["data_queue"]
        done, ended = self._arguments["done_event"], False
        self._start()
        while (task := tasks.get()) is not None:
            if isinstance(task, ResumeIteration):
                if self._failure is None:
                    self._begin_epoch(task.seed)
                ended = False
                results.put((task, None))
            elif not ended and not done.is_set():
                number, indices = task
                result = self._fetch(indices)
                ended = isinstance(result, IterableEnded)
                results.put((number, result))
                del result, indices  # a batch must not live until the next one is there
            del task

    def _start(self) -> None:
        try:
            if self._arguments["init_fn"] is not None:
                self._arguments["init_fn"](self._worker)
            self._fetcher = self._new_fetcher()
        except BaseException:  # it would end this thread, and nobody would know
            self._failure = self._wrapped()

    def _begin_epoch(self, epoch: Any) -> None:
        dataset = dataset_of(self._dataset)
        if epoch is not None and isinstance(dataset, IterableDataset):  # a copy
            epoch.call(dataset)
        self._fetcher = self._new_fetcher()

    def _new_fetcher(self) -> Any:
        kind, batched, drop_last = (
            self._arguments[name] for name in ("dataset_kind", "auto_collation", "drop_last")
        )
        return dataset_kind_fetcher(kind, self._dataset, batched, self._collate_fn, drop_last)

    def _fetch(self, indices: object) -> Any:
        if self._failure is not None:
            return self._failure
        try:
            with buffering_by(self._buffers):
                return self._fetcher.fetch(indices)
        except BaseException as error:  # as above
            iterable = isinstance(self._dataset, (Source, IterableDataset))
            if isinstance(error, StopIteration) and iterable:
                return IterableEnded(self._worker)
            return self._wrapped()

    def _wrapped(self) -> Any:
        wrapper: Any = ExceptionWrapper
        return wrapper(where=f"in DataLoader worker thread {self._worker}")


def _hiding_the_worker(collate_fn: CollateFn) -> CollateFn:
    """torch's default_collate puts batches into files where it finds a worker: not needed here."""

    def collate(samples: object) -> Any:
        with worker_info_of_thread(None):
            return collate_fn(samples)

    return collate
