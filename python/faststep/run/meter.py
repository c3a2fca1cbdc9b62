"""Measures how often what was swapped is used, and how long it takes."""

from __future__ import annotations

import functools
import resource
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Meter", "Moment"]


class Moment(NamedTuple):
    """The state of all counters at the end of a step."""

    seconds: float
    faults: int
    steps: int
    calls: dict[str, int]
    taken: dict[str, float]


class Meter:
    """Counts calls, and the seconds in each kind of call without those in calls that it makes.

    Only the thread that made the meter is measured: another one's calls run beside it.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.taken: dict[str, float] = {}
        self.steps = 0
        self.first: Moment | None = None
        self._last: tuple[float, dict[str, int], dict[str, float]] | None = None
        self._faults = 0
        self._inside = 0.0
        self._thread = threading.get_ident()

    def timed(self, name: str, function: Callable[..., Any], step: bool = False) -> Any:
        """The function, measured.

        Args:
            name: of the kind of call.
            step: whether a call ends a step.
        """
        self.calls.setdefault(name, 0)
        self.taken.setdefault(name, 0.0)

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            outside, self._inside = self._inside, 0.0
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.calls[name] += 1
                self.taken[name] += took - self._inside
                self._inside = outside + took
                if step:
                    self._end_step()

        return measured

    def _end_step(self) -> None:
        self.steps += 1
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._last = (time.perf_counter(), dict(self.calls), dict(self.taken))
        if self.first is None:
            self.first = self.last

    @property
    def last(self) -> Moment | None:
        """At the end of the newest step."""
        if self._last is None:
            return None
        seconds, calls, taken = self._last
        return Moment(seconds, self._faults, self.steps, calls, taken)
