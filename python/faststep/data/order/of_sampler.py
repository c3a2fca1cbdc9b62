"""The order that each of torch's samplers gives.

torch's samplers draw random numbers when the first index is asked for. An order draws the same
numbers, from the same generator, at the same moment. The indices of all batches are then known, and
an epoch can be resumed at any batch. Any other sampler is asked batch by batch, as torch does.
"""

from __future__ import annotations

import functools
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ..types import State
from .draws import generator_of
from .keyed import KeyedSampler
from .orders import Order, Run, SequentialOrder
from .random_order import RandomOrder, between_epochs, not_drawn
from .ranked import DistributedOrder, KeyedOrder

MOST_AT_ONCE = 1 << 24  # indices that are drawn ahead where torch draws as it goes: 128 MiB


class OnceDrawnOrder(Order):
    """Samplers that draw all random numbers of an epoch when they are asked for the first index.

    No seed repeats these draws, so the state holds the generator's whole state, 5 kB. The sampler's
    indices are read batch by batch, so they are never all in one list.
    """

    in_lists = True
    _resumes = False

    def _load(self, state: State) -> None:
        self.state.update({k: state[k] for k in ("generator", "global") if k in state})
        self._resumes = "global" in state

    def _draw(self) -> None:
        own = generator_of(self.sampler)
        if own is not None:
            if "generator" in self.state:
                own.set_state(self.state["generator"])
            self.state["generator"] = own.get_state()
            self._begin()
            return
        generator = self._global()
        before = generator.get_state()
        generator.set_state(self.state.setdefault("global", before))
        self._begin()
        if self._resumes:
            generator.set_state(before)  # it was drawn from before the state was saved

    def _begin(self) -> None:
        self._items = iter(self.sampler)
        self._list, self._list_from = [*islice(self._items, 1)], 0  # from this place on
        if self.skipped:
            self._list = [*islice(self._items, self.skipped - 1, self.skipped)]

    def _indices(self, start: int, count: int) -> Run:
        self._list, self._list_from = self._list[start - self._list_from :], start
        if self.error is not None:
            raise self.error
        try:
            self._list += islice(self._items, max(0, count - len(self._list)))
        except Exception as error:
            self.error = error
            raise
        return self._list[:count], 0, count

    def take_back(self, runs: list[Run]) -> None:
        before = [items[start : start + count] for items, start, count in runs[:-1]]
        self._list = [*chain(*before), *self._list]  # which begins with the last run
        self._list_from -= sum(map(len, before))

    def _global(self) -> torch.Generator:
        weights = getattr(self.sampler, "weights", None)
        if isinstance(weights, torch.Tensor) and weights.device.type == "cuda":
            return torch.cuda.default_generators[weights.get_device()]
        return torch.default_generator

    def state_after(self, batches: int) -> State:
        return {**not_drawn(self), **super().state_after(batches)}

    def finished_state(self) -> State:
        return between_epochs(self)


def parts_of(sampler: object) -> list[object]:
    """A sampler, and the one that it asks if it is a batch sampler."""
    return [sampler, getattr(sampler, "sampler", None)]


def _with_epoch(sampler: object) -> Any:
    for part in parts_of(sampler):
        if type(getattr(part, "epoch", None)) is int and hasattr(part, "set_epoch"):
            return part
    return None


def epoch_of(sampler: object) -> int | None:
    """The epoch that a sampler was set to; None if it has none."""
    return getattr(_with_epoch(sampler), "epoch", None)


def restore(sampler: object, state: State, finished: bool) -> None:
    """Sets what belongs to a sampler or dataset itself: epoch, and generator between two epochs."""
    counting = _with_epoch(sampler)
    # the epoch of a DistributedSampler is set by the script
    if "epoch" in state and not (finished and isinstance(counting, DistributedSampler)):
        counting.set_epoch(state["epoch"])
    generator = generator_of(*parts_of(sampler))
    if finished and "generator" in state and generator is not None:
        generator.set_state(state["generator"])


@functools.cache
def _draws_as_torch() -> bool:
    """True if this torch's RandomSampler draws as RandomOrder does: tried, on a few numbers."""
    with torch.random.fork_rng(devices=[]):
        for seed, count, replacement in ((1, 7, False), (2, 1000, True), (3, 17, False)):
            states = []
            for is_ours in (True, False):
                torch.default_generator.manual_seed(seed)
                sampler = RandomSampler(range(7), replacement, count)
                if is_ours:
                    order = RandomOrder(sampler, 3, False, None)
                    order.request(0)
                    for batch in range(1, order.batches + 1):
                        order.request(batch)
                    items, start, size = order.run(0, order.batches)
                    indices = items[start : start + size].tolist()
                else:
                    indices = list(sampler)
                states.append((indices, torch.default_generator.get_state().tolist()))
            if states[0] != states[1]:
                return False
    return True


def order_of(batch_sampler: object, state: State | None = None) -> Order | None:
    """The order that a batch sampler will give; None if it has to be asked.

    Args:
        batch_sampler: of a DataLoader, or None.
        state: of an epoch to go on with.
    """
    if type(batch_sampler) is not BatchSampler:
        return None
    sampler: Any = batch_sampler.sampler
    kind: type[Order] | None = {
        SequentialSampler: SequentialOrder,
        KeyedSampler: KeyedOrder,
        DistributedSampler: DistributedOrder,
        SubsetRandomSampler: OnceDrawnOrder,
        WeightedRandomSampler: OnceDrawnOrder,
        RandomSampler: RandomOrder,
    }.get(type(sampler))
    if kind is RandomOrder:
        # torch draws more whenever it needs more: of a generator of the user's that shows
        lazy = sampler.replacement or sampler.num_samples > len(sampler.data_source)
        asked = lazy and (sampler.generator is not None or sampler.num_samples > MOST_AT_ONCE)
        is_global = sampler.generator is torch.default_generator
        if asked or is_global or not _draws_as_torch():
            return None
    if kind is None:
        return None
    return kind(sampler, batch_sampler.batch_size, batch_sampler.drop_last, state)
