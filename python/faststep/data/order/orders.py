"""The order of an epoch, if it can be known before its batches are asked for."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..types import State

AT_ONCE = 1 << 14  # indices computed at a time, where they are

Run = tuple[Any, int, int]  # indices: a list or an int64 tensor; the first place in it; how many


def start_of(batch: int, sizes: list[tuple[int, int, int]]) -> int:
    """The first sample of a batch, where sizes begin with a batch and its first sample."""
    first, start, size = next(turn for turn in reversed(sizes) if turn[0] <= batch)
    return start + (batch - first) * size


class Order:
    """The order of an epoch, in batches. They are asked for from the first to the last.

    The sampler is asked for its length no sooner than torch asks it: a dataset may still grow.

    Args:
        sampler: of the indices.
        batch_size, drop_last: as in torch.utils.data.BatchSampler.
        state: what `state` returned in the epoch to go on with; None for a new one.
    """

    in_lists = False  # runs are lists, not tensors
    error: Exception | None = None  # of the sampler, for the batch that it is about
    batches: int  # from the first request on

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, state: State | None) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.drawn = False
        self.skipped = 0  # samples that were delivered before this epoch was taken up again
        self._sizes = [(0, 0, batch_size)]  # first batches of a size, and their first samples
        if state is not None:
            for key, (value, what) in self._identity().items():
                if state.get(key) != value:
                    raise ValueError(
                        f"this state is of {what} {state.get(key)!r}, and the loader's is {value!r}"
                    )
            self._load(state)
            self.skipped = state["samples_yielded"]

    @functools.cached_property
    def state(self) -> State:
        """What tells the sampler from others, and what it has drawn."""
        identity = {key: value for key, (value, _) in self._identity().items()}
        return {"sampler": type(self.sampler).__name__, **identity}

    @functools.cached_property
    def _samples(self) -> int:
        return max(0, self._count())

    def count_batches(self) -> None:
        """Asks the sampler for its length, the first time."""
        first, start, size = self._sizes[-1]
        whole, left = divmod(self._samples - start, size)
        self.batches = first + whole + (left > 0 and not self.drop_last)
        # the request at which torch's sampler would run to its end
        self._last = max(0, self.batches if self.drop_last or not left else self.batches - 1)

    def set_batch_size(self, batch: int, size: int) -> bool:
        """Gives batches another size, from one on that torch has not asked for; False if none has.

        torch's BatchSampler looks at its `batch_size` for each batch, but for `drop_last`.
        """
        start = self._start_of(batch)
        if self.drop_last or type(size) is not int or size < 1 or start >= self._samples:
            return False
        self._sizes.append((batch, start, size))
        self.batch_size = size
        self.count_batches()
        return True

    def _start_of(self, batch: int) -> int:
        return start_of(batch, self._sizes)

    def take_back(self, runs: list[Run]) -> None:
        """These newest runs will be asked for again, in other batches."""

    def request(self, batch: int) -> None:
        """Draws what torch's sampler draws when it is asked for this batch, which come in order."""
        if batch == 0:
            self.count_batches()
            self._draw()
            self.drawn = True
        if batch == self._last:
            self._draw_at_end()

    def next_draw(self, batch: int) -> int:
        """The first request from this one on that draws something, or finds the end."""
        if batch == 0:
            return 0
        return self._last if batch <= self._last else max(batch, self.batches)

    def run(self, batch: int, batches: int = 1) -> Run:
        """The indices of a batch, or of some from that on.

        What a signal handler raises inside changes nothing: the same may be asked for again. An
        exception of the sampler is `error` from then on.
        """
        start = self._start_of(batch)
        return self._indices(start, min(batches * self.batch_size, self._samples - start))

    def samples_in(self, batches: int) -> int:
        """Samples in the first batches, those before them included."""
        return self.skipped + min(self._samples, self._start_of(batches))

    def state_after(self, batches: int) -> State:
        return {**self.state, "samples_yielded": self.samples_in(batches)}

    def finished_state(self) -> State:
        return dict(self.state)

    def _identity(self) -> dict[str, tuple[object, str]]:
        """What a state must have in common with the sampler, and what a message calls it."""
        return {"length": (len(self.sampler), "a number of samples of")}

    def _load(self, state: State) -> None:
        """Keeps what it needs of a state, which fits the sampler."""

    def _count(self) -> int:
        """Samples that are left."""
        return len(self.sampler) - self.skipped

    def _draw(self) -> None:
        raise NotImplementedError

    def _draw_at_end(self) -> None:
        pass

    def _indices(self, start: int, count: int) -> Run:
        raise NotImplementedError


class SequentialOrder(Order):
    def _draw(self) -> None:
        self._start, self._computed = 0, torch.empty(0, dtype=torch.int64, device="cpu")

    def _indices(self, start: int, count: int) -> Run:
        if not self._start <= start <= start + count <= self._start + len(self._computed):
            stop = min(self._samples, start + max(count, AT_ONCE))
            self._start, self._computed = start, self._compute(start, stop)
        return self._computed, start - self._start, count

    def _compute(self, start: int, stop: int) -> torch.Tensor:
        return torch.arange(self.skipped + start, self.skipped + stop, device="cpu")


def other_epoch(saved: int, now: int | None, what: str = "sampler") -> ValueError:
    return ValueError(
        f"the loaded state is in the middle of epoch {saved}, but the {what} was set to epoch "
        f"{now} since; call set_epoch({saved}), or do not load the state"
    )
