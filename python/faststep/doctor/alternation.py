"""Remedies that are turned on and off between the steps of one run, and what each gains."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .gains import Gain, compare

COUNTED, SLOW = 3, 0.1  # steps of a stretch; one where a step takes this many seconds
LEAST_PAIRS, ENOUGH_PAIRS = 3, 6  # of stretches without and with
SECONDS, MOST_SECONDS = 1.0, 3.0  # for each switch, if that is enough for the least pairs
LONGEST, ALTOGETHER = 10.0, 15.0  # seconds for a switch, and for all


class Switch(NamedTuple):
    """A change that can be made between two steps of a script that will not be kept.

    Attributes:
        name: of the remedy, or of what is left out.
        turn: called with True and False in turns, False last.
        change: the remedy, or one that it says something of, as `is_chosen` knows it.
        in_one_thread: both sides compute in one thread, where a change is of one alone.
        skipped: steps after each turn that are not counted.
    """

    name: str
    turn: Callable[[bool], object]
    change: dict[str, Any] = {}  # noqa: RUF012
    in_one_thread: bool = False
    skipped: int = 1


class Alternation:
    """Tries switches in stretches of steps: without, with, with, without, and so on.

    A switch is left out if its stretches would take longer than the time that is left.

    Attributes:
        gains: of each switch that had enough stretches.

    Args:
        chosen: most important first.
        seconds: of a step.
    """

    def __init__(self, chosen: Sequence[Switch], seconds: float) -> None:
        self.gains: dict[str, Gain] = {}
        self._waiting = list(chosen)
        self._seconds = seconds
        self._counted = COUNTED if seconds < SLOW else 1
        self._is_on = False
        self._started = self._begun = self._last = time.perf_counter()
        self._count = 0  # steps of this stretch
        self._stretch: list[float] = []
        self._stretches: tuple[list[float], list[float]] = ([], [])
        self._threads = torch.get_num_threads()
        self._begin()

    def is_over(self) -> bool:
        """After a step: note how long it took, and prepare the next one."""
        if not self._waiting:
            return True
        self._count += 1
        now = self._time()
        if self._count > self._waiting[0].skipped:
            self._stretch.append(now - self._last)
        if len(self._stretch) == self._counted:
            self._end_stretch(now)
        self._last = time.perf_counter()
        return not self._waiting

    def _time(self) -> float:
        """Of the device where there is one, which the host runs ahead of, if that is counted."""
        has_device: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if has_device and self._count >= self._waiting[0].skipped:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _begin(self) -> None:
        """Begin with the next switch for which there is time."""
        self._begun = self._last = time.perf_counter()
        self._stretches, self._stretch, self._count = ([], []), [], 0
        left = min(LONGEST, ALTOGETHER - (self._begun - self._started))
        while self._waiting and self._needed(self._waiting[0]) > left:
            self._waiting.pop(0)
        if self._waiting and self._waiting[0].in_one_thread:
            torch.set_num_threads(1)

    def _needed(self, switch: Switch) -> float:
        """Seconds of the least number of stretches."""
        return 2 * LEAST_PAIRS * (switch.skipped + self._counted) * self._seconds

    def _end_stretch(self, now: float) -> None:
        self._stretches[self._is_on].append(statistics.median(self._stretch))
        self._stretch, self._count = [], 0
        if self._is_enough(now):
            self._end()
        else:
            self._turn(sum(map(len, self._stretches)) % 4 in (1, 2))  # off, on, on, off

    def _turn(self, is_on: bool) -> None:
        if is_on != self._is_on:
            self._waiting[0].turn(is_on)
            self._is_on = is_on

    def _is_enough(self, now: float) -> bool:
        pairs = min(map(len, self._stretches))
        if len(self._stretches[0]) != len(self._stretches[1]):
            return False
        seconds = now - self._begun
        if pairs < LEAST_PAIRS:
            return seconds > 2 * LONGEST  # it is much slower than thought
        return seconds > (SECONDS if pairs >= ENOUGH_PAIRS else MOST_SECONDS)

    def _end(self) -> None:
        """Note the gain of a switch, and go on to the next."""
        self._turn(False)
        switch = self._waiting.pop(0)
        if switch.in_one_thread:
            torch.set_num_threads(self._threads)
        if len(self._stretches[0]) >= LEAST_PAIRS:
            self.gains[switch.name] = compare(
                [([a], [b]) for a, b in zip(*self._stretches, strict=True)]
            )
        self._begin()
