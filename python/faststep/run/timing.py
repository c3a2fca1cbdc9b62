"""Measures how often what was swapped is used, and how long it takes."""

from __future__ import annotations

import functools
import resource
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

ALONE = 3  # objects of a class that have a row each


class Moment(NamedTuple):
    """The state of all counters at the end of a step."""

    seconds: float
    calls: dict[str, int]
    taken: dict[str, float]


class Look(NamedTuple):
    """The kernel's counters at some time."""

    seconds: float
    faults: int
    steps: int


class _Here(threading.local):
    """What is known of each thread; a lock could be left locked by a fork."""

    def __init__(self, all_steps: list[Counter[type]]) -> None:
        self.stepping: object = None
        self.steps: Counter[type] = Counter()
        all_steps.append(self.steps)


class CallTimes:
    """Counts calls, and the seconds in each kind of call without those in calls that it makes.

    Only the thread that made the meter is measured: another one's calls run beside it, and of
    these steps alone are counted.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.taken: dict[str, float] = {}
        self.first: Moment | None = None
        self.last: Moment | None = None  # at the end of the newest step
        self._looks: list[Look] = []
        self._inside = 0.0
        self._all_steps: list[Counter[type]] = []  # of each thread
        self._here = _Here(self._all_steps)
        self._names: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self._objects: Counter[str] = Counter()
        self._thread = threading.get_ident()

    @property
    def steps(self) -> Counter[type]:
        """Those of the optimizers of each class."""
        return sum(self._all_steps, Counter[type]())

    def timed(self, name: str, function: Callable[..., Any]) -> Any:
        """The function, measured under this name."""
        return self._measured(lambda args: name, function)

    def timed_step(self, function: Callable[..., Any]) -> Any:
        """The step of an optimizer, its first argument, measured under the optimizer's name.

        A step that returns False was tried, and another one follows.
        """
        measured = self._measured(lambda args: self._name_of(args[0]), function)

        @functools.wraps(function)
        def stepped(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            here = self._here
            if torch.compiler.is_compiling() or here.stepping is optimizer:
                return function(optimizer, *args, **kwargs)
            outside, here.stepping = here.stepping, optimizer
            result = None
            try:
                result = measured(optimizer, *args, **kwargs)
            finally:
                here.stepping = outside
                if result is not False:
                    self._end_step(type(optimizer))
            return result

        return stepped

    def _measured(self, name_of: Callable[[Any], str], function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_elsewhere():
                return function(*args, **kwargs)
            outside, self._inside = self._inside, 0.0
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                name = name_of(args)
                self.calls[name] = self.calls.get(name, 0) + 1
                self.taken[name] = self.taken.get(name, 0.0) + took - self._inside
                self._inside = outside + took

        return measured

    def _is_elsewhere(self) -> bool:
        return threading.get_ident() != self._thread

    def _name_of(self, optimizer: Optimizer) -> str:
        """That of its class, with a number if there is more than one of the class."""
        name = self._names.get(optimizer)
        if name is None:
            name = type(optimizer).__name__
            self._objects[name] += 1
            number = self._objects[name]
            if number > 1:
                name = f"{name} {number}" if number <= ALONE else f"other {name}"
            self._names[optimizer] = name
        return name

    def _end_step(self, kind: type) -> None:
        self._here.steps[kind] += 1
        if self._is_elsewhere():
            return
        now = time.perf_counter()
        self.last = Moment(now, dict(self.calls), dict(self.taken))
        if self.first is None:
            self.first = self.last
            self._looks = [self._look(now)] * 2
        elif now - self._looks[1].seconds > 1.0:
            self._looks[1] = self._look(now)

    def _look(self, now: float) -> Look:
        """Ask the kernel, which may let other programs run at that time: once per second."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return Look(now, faults, self.steps.total())

    def faults_per_step(self) -> float:
        """Page faults per step of an optimizer, from the first step on."""
        first, last = self._looks
        if last is first:  # the program took less than a second
            last = self._look(0.0)
        return (last.faults - first.faults) / (last.steps - first.steps)
