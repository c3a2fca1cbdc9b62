"""The iterator over an epoch whose batches C threads gather from arrays."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any, NamedTuple

import torch

from ... import _C
from ..._torch.data_loader import (
    BaseDataLoaderIter,
    ExceptionWrapper,
    MultiProcessingDataLoaderIter,
    SingleProcessDataLoaderIter,
    call_as_constructor,
    dataset_fetcher,
    pin_memory,
    profile_name,
)
from ..at_exit import close_at_exit
from ..order.indices import Indices
from ..order.of_sampler import order_of
from ..order.orders import Order, Run
from ..resume.loader_stand_in import LoaderStandIn, asked_ahead
from ..resume.progress import Progress
from ..stats import Metered
from ..types import Loader, State
from .columns import NotArrays
from .gather_plan import GatherPlan

AHEAD = 4  # batches gathered ahead without workers; with them prefetch_factor * num_workers
MOST_BYTES_AHEAD = 1 << 29
BATCHES_AT_ONCE = 64  # whose indices are asked of a known order

_process = os.getpid()  # asking the system for each batch would take 0.15 us


def _note_fork() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_note_fork)


class _RunOfBatches(NamedTuple):
    """The indices of consecutive batches of a known order."""

    first: int  # batch
    run: Run
    submits: bool  # whether they can be handed to the threads


NO_RUN = _RunOfBatches(0, ((), 0, 0), False)


def _is_submittable(indices: object) -> bool:
    """True if a batch of indices can be handed to the threads; a tensor must be packed int64."""
    if type(indices) is not torch.Tensor:
        return type(indices) in (list, tuple)
    return (
        indices.dtype == torch.int64
        and indices.dim() == 1
        and indices.device.type == "cpu"
        and indices.is_contiguous()
        and not indices.is_neg()
    )


class _Entry(NamedTuple):
    """A batch in the queue: it is gathered, or waits for that."""

    number: int
    indices: Any  # a Run of a known order, else what the sampler gave
    plan: GatherPlan | None = None  # whose threads gather it; None if torch's fetcher has to
    batch: _C.Batch | None = None  # what they gather
    error: Exception | None = None  # what stands in its place


class ArrayIterator(Metered, BaseDataLoaderIter):
    """Delivers what torch's iterator would, with batches gathered ahead by threads.

    The sampler is asked when torch would ask it: without workers for one batch at a time, with
    workers for prefetch_factor * num_workers ahead. Without workers, where the order is known
    (order/of_sampler.py), up to AHEAD batches are gathered ahead from the same indices.

    Args:
        loader: the DataLoader.
        plan: the arrays of its dataset.
        slots: the memory of its batches.
        state: of an epoch to go on with, or of the end of one; None for a new one.
    """

    progress: Progress
    _process = 0  # until the constructor sets it; it may fail before

    def __init__(
        self, loader: Loader, plan: GatherPlan, slots: _C.Slots, state: State | None = None
    ) -> None:
        stand_in = LoaderStandIn(loader, state, ahead=1)
        call_as_constructor[loader.num_workers > 0](BaseDataLoaderIter.__init__, self, stand_in)
        self._profile_name = profile_name(self._num_workers)
        if self._timeout != 0 and self._num_workers == 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        if self._num_workers and loader.prefetch_factor <= 0:  # type: ignore[operator] # torch's error
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        self._plan = plan
        self._is_current = False  # the plan is started, and no tensor is known to have moved
        self._bytes = 0  # of the newest batch, if it was gathered
        self._slots = slots
        self._batch_sampler = loader.batch_sampler
        self._prefetch = AHEAD
        self._asked_ahead = 1  # batches that torch has asked for when it hands one out
        self._known = NO_RUN
        if self._num_workers:
            self._prefetch = asked_ahead(loader)
            self._asked_ahead += self._prefetch
            self._sampler_iter = iter(self._index_sampler)  # as torch does, a second time
        device = loader._faststep.device
        self._on_device = 0 if device is None else loader._faststep.prefetch_to_device
        self._gathers_pinned = self._pin_memory or (device is not None and device.type == "cuda")
        self._lock = threading.Lock()
        self._process = _process
        if stand_in.base_seed is not None:
            self._base_seed = stand_in.base_seed
        if state and stand_in.resumes:
            self._num_yielded = state["_num_yielded"]
            self._begin(state)
        else:
            self._begin(None)
        if isinstance(self._index_sampler, Indices):
            self._index_sampler.state = None  # for epochs to come
        close_at_exit(self)

    def _begin(self, state: State | None) -> None:
        order = order_of(self._batch_sampler, state["_sampler_iter_state"] if state else None)
        self._order = order
        self._known = NO_RUN
        is_asked = order is None and isinstance(self._index_sampler, Indices)
        source = self._index_sampler.source if is_asked else order
        self.progress = Progress(source, int(self._base_seed), self._num_yielded)
        self._limit = 0 if order is None else self._most_ahead(order)
        self._requested = 0  # up to which request a known order was asked, or need not be
        self._ended = False  # the sampler has no more
        self._is_fetched = False  # the arrays are gone: torch's fetcher makes the rest
        self._versions = self._plan.versions()
        self._queue: deque[_Entry] = deque()  # what is not delivered, in order
        slots_per_batch = len(self._plan.forms)
        self._slots.keep((min(self._prefetch, AHEAD * 4) + self._on_device + 3) * slots_per_batch)
        if self._num_workers:
            self._request_until(self._prefetch)
            if order is not None:
                self._add_known(order)

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        """Starts the next epoch; a DataLoader with persistent workers calls it."""
        with self._lock:
            BaseDataLoaderIter._reset(self, loader, first_iter)
            self._stop()
            self._begin(None)

    def _request_until(self, count: int) -> None:
        """Asks the sampler until torch would have asked so often."""
        order = self._order
        if order is None:
            while not self._ended and self._next_number() < count:
                self._request()
        else:
            while not self._ended and self._requested < count:
                self._requested = order.next_draw(self._requested)
                if self._requested >= count:
                    return
                self._ended = True  # stays if `request` raises, as a generator in torch would end
                order.request(self._requested)
                self._ended = self._requested >= order.batches
                self._requested += 1

    def _request(self) -> None:
        """Asks a sampler of unknown order once more."""
        try:
            indices = next(self._sampler_iter)
        except StopIteration:
            self._ended = True
        except Exception as error:
            self._queue.append(_Entry(self._next_number(), None, error=error))
        else:
            self._add(self._next_number(), indices, (indices,), _is_submittable(indices))

    def _next_number(self) -> int:
        """The number of the next batch for the queue.

        Counted from what is there: an interrupt between two lines must not lead to another count.
        """
        return self._queue[-1].number + 1 if self._queue else self.progress.delivered

    def _add_known(self, order: Order) -> None:
        if not order.drawn:
            return
        number, size = self._next_number(), order.batch_size
        while len(self._queue) <= self._limit and number < order.batches:
            first, (items, start, count), submits = self._known
            place = (number - first) * size
            if not 0 <= place < count:
                try:
                    # of indices in lists one batch at a time: a list is complete
                    run = order.run(number, 1 if order.in_lists else BATCHES_AT_ONCE)
                    self._known = _RunOfBatches(number, run, _is_submittable(run[0]))
                except Exception as error:
                    if error is not order.error:  # a signal handler's: the run is asked for again
                        raise
                    if self._queue:  # not before its place
                        return
                    order.batches = number
                    raise
                continue
            run = (items, start + place, min(size, count - place))
            self._add(number, run, run, submits)
            number += 1

    def _set_batch_size(self, order: Order, asked: int) -> None:
        """torch, which has asked for so many batches, asks for the next one by its new size."""
        if order.set_batch_size(asked, self._batch_sampler.batch_size):
            stale = [entry.indices for entry in self._queue if entry.number >= asked]
            if stale:
                order.take_back(stale)
            self._queue = deque(entry for entry in self._queue if entry.number < asked)
            self._known, self._requested = NO_RUN, asked

    def _most_ahead(self, order: Order) -> int:
        """How many batches may be in the queue: fewer if they are very large."""
        size = max(1, order.batch_size * self._plan.row_bytes)
        return max(2, min(self._prefetch, MOST_BYTES_AHEAD // size))

    def _add(self, number: int, indices: object, arguments: object, submits: bool) -> None:
        batch = self._submit(arguments) if submits else None
        self._queue.append(_Entry(number, indices, self._plan if batch else None, batch))

    def _submit(self, arguments: Any) -> _C.Batch | None:
        """Asks the threads for a batch; None if it cannot be gathered."""
        while not self._is_fetched:
            if not self._is_current:
                self._start()
                continue
            given = self._with_pinned_outputs(*arguments) if self._gathers_pinned else arguments
            batch = self._plan.gather.submit(*given)
            if batch is not None:
                return batch or None
            self._is_current = False  # a tensor moved; batches in the queue read its old memory
        return None

    def _start(self) -> None:
        """Plans anew if tensors have moved; notes if the dataset is not in arrays any more."""
        try:
            self._plan = self._plan.start(self._slots, self._num_workers)
            self._is_current = True
        except NotArrays:
            self._is_fetched = True

    def _with_pinned_outputs(self, items: Any, start: int = 0, count: int = -1) -> Any:
        """Arguments of `submit`, with page-locked memory for the batch.

        It is torch's, not ours: torch gives it to nobody else while a copy that a user started with
        `non_blocking=True` is on its way. Of other memory torch does not know who reads it.
        """
        rows = len(items) if count < 0 else count
        outputs = tuple(
            torch.empty(
                (rows, *form.prototype.shape[1:]),
                dtype=form.prototype.dtype,
                device="cpu",
                pin_memory=True,
            )
            for form in self._plan.gathered
        )
        return items, start, count, outputs

    def _next(self) -> object:
        if _C.is_recorded():
            return super()._next()  # under the name that torch's iterator has in profiles
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        if self._process != _process:
            self._go_on_in_child()
        with self._lock:
            progress, order = self.progress, self._order
            while self._queue and self._queue[0].number < progress.delivered:
                self._queue.popleft()  # an interrupt came when it was being delivered
            if not self._num_workers:
                self._see_changes()
            asked = progress.delivered + self._asked_ahead
            if order is not None and order.batch_size != self._batch_sampler.batch_size:
                self._set_batch_size(order, asked - 1)
            if order is None or asked > self._requested:
                self._request_until(asked)
            if order is not None:
                self._add_known(order)
            if not self._queue:
                progress.finished = True
                self._stop()
                raise StopIteration
            return self._deliver(self._queue[0])

    def _deliver(self, entry: _Entry) -> object:
        plan, tensors = entry.plan, None
        if entry.batch is not None:
            tensors = entry.batch.take()
        self.progress.delivered = entry.number + 1
        self._queue.popleft()
        if entry.error is not None:
            raise entry.error
        if plan is not None and tensors is not None:
            rows = len(entry.indices) if self._order is None else entry.indices[2]
            self._bytes = rows * plan.row_bytes
            if plan.in_place is not None:
                plan.in_place.put(tensors)
            return tensors if plan.structure.is_flat else plan.structure.batch(iter(tensors))
        self._bytes = 0
        data = self._fetch(entry)
        return pin_memory(data, self._pin_memory_device) if self._pin_memory else data

    def bytes_of(self, batch: object) -> int | None:
        return self._bytes or super().bytes_of(batch)

    def _fetch(self, entry: _Entry) -> object:
        """Fetches a batch that cannot be gathered by torch's fetcher, whose errors are torch's."""
        indices = entry.indices
        if self._order is not None:
            items, start, count = indices
            part = items[start : start + count]
            indices = part.tolist() if isinstance(part, torch.Tensor) else part
        try:
            return dataset_fetcher(self._dataset, self._collate_fn).fetch(indices)
        except Exception:
            if not self._num_workers:
                raise
            worker = (self.progress.before + entry.number) % self._num_workers
            wrapper: Any = ExceptionWrapper
            failure = wrapper(where=f"in DataLoader worker process {worker}")
        return failure.reraise()

    def _go_on_in_child(self) -> None:
        """In a forked child, which has none of the threads: starts new ones for the queue."""
        self._process = _process
        self._lock = threading.Lock()
        self._is_current = False
        self._gather_anew()

    def _gather_anew(self) -> None:
        self._queue = deque(map(self._again, self._queue))

    def _again(self, entry: _Entry) -> _Entry:
        if entry.plan is None:
            return entry
        batch = self._submit(entry.indices if self._order else (entry.indices,))
        return entry._replace(plan=self._plan if batch else None, batch=batch)

    def _see_changes(self) -> None:
        """Where a script writes to its tensors in the loop, torch shows that with the next batch.

        Its workers have copies, and so show nothing.
        """
        versions = self._plan.versions()
        if versions != self._versions:
            self._versions = versions
            self._limit = 0  # it will write again
            self._gather_anew()

    def _stop(self) -> None:
        self._is_current = False
        for plan in {self._plan, *(entry.plan for entry in self._queue if entry.plan)}:
            if hasattr(plan, "gather"):
                plan.gather.close()
                del plan.gather
        self._queue.clear()

    def _shutdown_workers(self) -> None:
        """Ends the threads, as torch's ends workers. They end with an iterator that is dropped."""
        if self._process == _process and self._lock.acquire(blocking=False):
            try:
                self._ended = True
                self._order = None  # asked no more
                self._stop()
            finally:
                self._lock.release()


class ArraysAlone(ArrayIterator, SingleProcessDataLoaderIter):
    """To a script it is the iterator that torch has without workers."""


class ArraysByWorkers(ArrayIterator, MultiProcessingDataLoaderIter):
    """To a script it is the iterator that torch has with workers."""
