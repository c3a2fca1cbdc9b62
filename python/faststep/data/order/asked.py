"""Samplers whose order cannot be known ahead: they are asked for one batch at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler

from ..types import State
from .draws import generator_of, noting, repeating
from .of_sampler import epoch_of, parts_of
from .orders import other_epoch, start_of
from .stateful import Pace, begin, is_stateful, items_of, opened, snapshot, states_of


class AskedOrder(Iterator[object]):
    """An index sampler that is asked for one batch after another, as torch does.

    To resume, a sampler that keeps a state loads it. Any other one draws its indices again, from
    the same random states, and those that were delivered are dropped.

    Args:
        sampler: the index sampler: of batches, or with batch_size=None of samples.
        ahead: the most batches that may have been asked for and not delivered.
        every: how often a sampler that keeps a state is asked for it, as in Pace.
        state: what `state_after` or `finished_state` returned; None for a new epoch.
    """

    def __init__(self, sampler: Any, ahead: int, every: int | None, state: State | None) -> None:
        self.batch_size: int = sampler.batch_size if type(sampler) is BatchSampler else 0
        self._sampler = sampler
        self._sizes = [(0, 0, self.batch_size or 1)]
        self._drop_last = self.batch_size > 0 and sampler.drop_last
        self._asked = asked_by(sampler)
        self._own = generator_of(*parts_of(self._asked))
        self._ahead, self._pace = ahead, Pace(every)
        self._states = None if state is None else state.get("states")
        self._resumes = state is not None and "items_yielded" in state
        self._draws: State = {
            "iter": {},
            "first": {},
        }  # random states before `iter` and before the first item
        self._before = 0  # items delivered before the epoch was taken up again
        self._skips = 0  # items to drop, as they were delivered before
        self._epoch = epoch_of(self._asked)
        if state is not None and self._resumes:
            self._before = state["items_yielded"]
            self._skips = state.get("since", self._before)
            self._epoch = state.get("epoch")
            self._draws.update({key: dict(noted) for key, noted in state["draws"].items()})
        self._given = self.position = 0  # items and batches given since then
        self._snapshots: deque[tuple[int, int, bytes]] = deque()  # batches, items; states
        self._iterator: Any = None
        self._items: Iterator[object] = iter(())
        self._started = self._ended = False
        self._is_fresh = False  # whether the iterator was begun anew, and not asked yet
        if not self.batch_size:
            self._begin()  # torch's BatchSampler does so for its first batch

    def __next__(self) -> object:
        if self._ended:
            raise StopIteration
        items = self._take() if self._started else self._take_first()
        self._given += len(items)
        self.position += 1
        self._keep()
        return items if self.batch_size else items[0]

    def _begin(self) -> None:
        if self._resumes and self._epoch is not None and self._epoch != epoch_of(self._asked):
            raise other_epoch(self._epoch, epoch_of(self._asked))
        states, self._states = self._states, None
        self._is_fresh = states is None or states["ended"] is None or not self._resumes
        noted = self._draws["iter"]
        # with a batch size `_take_first` calls this, and puts the generators back itself
        put_back = not self.batch_size
        with repeating(noted, self._own, put_back) if noted else noting(noted, self._own):
            iterator = begin(self._asked, states)
            self._ended = iterator is None and self._resumes
            if iterator is None:
                iterator = iter(()) if self._resumes else iter(self._asked)
            self._iterator = iterator
        self._items = items_of(self._iterator)
        self._keep()

    def _take_first(self) -> list[object]:
        noted = self._draws["first"]
        with repeating(noted, self._own) if noted or self._skips else noting(noted, self._own):
            if self._iterator is None:
                self._begin()
            self._started, self._is_fresh = True, False
            if self._skips:
                self._skip()
            else:
                return self._take()
        return self._take()

    def _skip(self) -> None:
        count, self._skips, missing = self._skips, 0, object()
        if next(islice(self._items, count - 1, None), missing) is missing:
            raise RuntimeError(
                f"the {type(self._asked).__name__} ended within the first {count} items, which it "
                "gave before the state was saved"
            )

    def _take(self) -> list[object]:
        if not self.batch_size:
            return [next(self._iterator)]
        if not self._drop_last and self.batch_size != self._sampler.batch_size:
            self.batch_size = self._sampler.batch_size  # as torch's BatchSampler looks each time
            self._sizes.append((self.position, self._given, self.batch_size))
        batch = [*islice(self._items, self.batch_size)]
        self._ended = len(batch) < self.batch_size
        if self._ended and (self._drop_last or not batch):
            raise StopIteration
        return batch

    def _keeps_state(self) -> bool:
        return is_stateful(self._asked) or is_stateful(self._iterator)

    def _keep(self) -> None:
        """Takes the sampler's state, which is of another position when the batch is delivered."""
        if not self._ahead or not self._keeps_state():
            return
        if self._snapshots and not self._pace.is_due():
            return
        states = self._pace.take(self._states_now)
        self._snapshots.append((self.position, self._given - self._skips, states))
        self.forget(self.position - self._ahead)

    def _states_now(self) -> State:
        return states_of(self._asked, self._iterator, None if self._is_fresh else self._ended)

    def forget(self, batches: int) -> None:
        """`state_after` will not be called for less than so many batches any more."""
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= batches:
            self._snapshots.popleft()

    def state_after(self, batches: int) -> State:
        """The state to go on with after so many batches of those since the epoch was taken up."""
        given = self._given if batches == self.position else start_of(batches, self._sizes)
        state = {**self._identity(), "items_yielded": self._before + given, "draws": {}}
        if self._epoch is not None:
            state["epoch"] = self._epoch
        if self._states is not None:  # loaded with the first batch
            states = self._states
            if not self._resumes:  # of the epoch before; its iterator has no part in this one
                states = {"object": states["object"], "iterator": None, "ended": None}
            return {**state, "states": states, "since": self._skips}
        if self._keeps_state():
            before, states = self._states_before(batches)
            return {**state, "states": states, "since": given - before}
        draws = {key: dict(noted) for key, noted in self._draws.items()}
        if not self._started and self._own is not None:
            draws["first"].setdefault("own", self._own.get_state())
        return {**state, "draws": {key: noted for key, noted in draws.items() if noted}}

    def _states_before(self, batches: int) -> tuple[int, State]:
        """The newest state of the sampler that is not of a later place, and its items."""
        for drawn, given, states in reversed(self._snapshots):
            if drawn <= batches:
                return given, opened(states)
        return self._given - self._skips, opened(snapshot(self._states_now))

    def finished_state(self) -> State:
        """The state to begin the next epoch with."""
        return state_between_epochs(self._asked, self._iterator)

    def _identity(self) -> State:
        return {"sampler": type(self._asked).__name__, "length": length_of(self._asked)}


def asked_by(sampler: object) -> Any:
    """Who is asked for an index sampler: torch's BatchSampler asks another one."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def state_between_epochs(asked: object, iterator: object = None) -> State:
    """The state of a sampler to begin its next epoch with, after the one of `iterator`."""
    state: State = {"sampler": type(asked).__name__, "length": length_of(asked)}
    epoch, own = epoch_of(asked), generator_of(*parts_of(asked))
    if epoch is not None:
        state["epoch"] = epoch
    if is_stateful(asked) or is_stateful(iterator):
        state["states"] = opened(snapshot(lambda: states_of(asked, iterator, True)))
    if own is not None:
        state["generator"] = own.get_state()
    return state


def length_of(sampler: Any) -> int | None:
    """How many items a sampler says that it has; None if it does not."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None
