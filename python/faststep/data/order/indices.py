"""The index sampler that torch's iterators see: it can begin within an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from ..types import State
from .asked import AskedOrder
from .of_sampler import order_of
from .orders import Order

AT_ONCE = 1024  # indices


class Indices:
    """Stands in for a loader's index sampler. Each `iter` begins an epoch, or resumes one.

    Args:
        sampler: the index sampler: of batches, or with batch_size=None of samples.
        ahead, every: as in AskedOrder.
    """

    source: Order | AskedOrder
    drawn: _KnownIndices | AskedOrder | _Without  # the newest iterator

    def __init__(self, sampler: Any, ahead: int, every: int | None) -> None:
        self._sampler = sampler
        self.ahead = ahead
        self._every = every
        self.state: State | None = None  # what the next `iter` goes on with
        self.delivered: tuple[int, ...] = ()  # numbers of batches that it leaves out
        self.discards = False  # whether torch will not use what the next `iter` returns

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[object]:
        if self.discards:
            self.discards = False
            return iter(())
        batches = batches_of(self._sampler)
        order = order_of(batches, self.state)
        if order is None:
            self.drawn = self.source = AskedOrder(
                self._sampler, self.ahead, self._every, self.state
            )
        else:
            self.source = order
            if type(self._sampler) is SequentialSampler:
                order.count_batches()  # its `iter` does so; a batch sampler asks it later
            self.drawn = _KnownIndices(order, batches, batched=batches is self._sampler)
        if self.delivered:
            self.drawn = _Without(self.drawn, self.delivered)
        return self.drawn


def batches_of(sampler: object) -> object:
    """An index sampler of batches; one of samples in batches of one, if its order can be known."""
    if type(sampler) is BatchSampler or not isinstance(sampler, torch.utils.data.Sampler):
        return sampler
    batches = BatchSampler(sampler, 1, False)
    return sampler if order_of(batches) is None else batches


class _Without(Iterator[object]):
    """Leaves out the batches with some numbers."""

    def __init__(self, drawn: Iterator[object], numbers: tuple[int, ...]) -> None:
        self._drawn = drawn
        self._numbers = numbers
        self.position = 0

    def __next__(self) -> object:
        while True:
            indices = next(self._drawn)
            self.position += 1
            if self.position - 1 not in self._numbers:
                return indices


class _KnownIndices(Iterator[object]):
    """The batches of torch's batch sampler, with its draws, where all of it is known at once."""

    def __init__(self, order: Order, batch_sampler: Any, batched: bool) -> None:
        self._order = order
        self._batch_sampler = batch_sampler
        self._batched = batched
        self.position = 0
        self._ended = False
        self._size = order.batch_size
        self._indices: list[int] = []
        self._at = 0  # of the next batch among them

    def __next__(self) -> object:
        number = self.position
        size = self._batch_sampler.batch_size
        if size != self._size and self._order.set_batch_size(number, size):
            self._size, self._indices, self._at = size, [], 0
        if not self._ended:
            self._ended = True  # stays if `request` raises, as a generator in torch would end
            self._order.request(number)  # one request more than there are batches, as torch's
            self._ended = number >= self._order.batches
        if self._ended:
            raise StopIteration
        self.position += 1
        if self._at >= len(self._indices):
            self._convert(number)
        start, self._at = self._at, self._at + self._size
        return self._indices[start : self._at] if self._batched else self._indices[start]

    def _convert(self, batch: int) -> None:
        """Some batches at a time, as that takes longer than a list's slice."""
        ahead = 1 if self._order.in_lists else max(1, AT_ONCE // self._size)
        self._ended = True  # stays if `run` raises
        items, start, count = self._order.run(batch, ahead)
        self._ended = False
        part = items[start : start + count]
        self._indices = part.tolist() if isinstance(part, torch.Tensor) else [*part]
        self._at = 0
