"""Measures contenders: they take turns, and the copy rate is taken in the same minutes."""

from __future__ import annotations

import gc
import os
import statistics
import time
from dataclasses import dataclass, field

import torch

from contenders import OURS, Contender, Round, UnavailableError, contenders_of
from workloads import Arena, Work, available_bytes


@dataclass
class Outcome:
    """What was measured of one work.

    Args:
        work: what was measured.
        seconds: the rounds' times for each contender, in the order of the tables.
        absent: the reason for each contender that could not be measured.
        copy_rate: bytes per second of ``copy_`` during the work, 8 bytes per fp32 element.
        load: the system's load average over the last minute, at the end of the work.
        order: the contenders' names in the order of the tables; default: all of the work's.
    """

    work: Work
    seconds: dict[str, list[float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    copy_rate: float = float("nan")
    load: float = float("nan")
    order: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The contenders in the order of the tables."""
        return self.order or tuple(contender.name for contender in contenders_of(self.work))

    def median(self, contender: str) -> float:
        """The median round in seconds; NaN where the contender was not measured."""
        times = self.seconds.get(contender)
        return statistics.median(times) if times else float("nan")

    def ratio(self, rival: str, contender: str = OURS) -> float:
        """How many times as long as ``contender`` the rival takes; above 1 we are faster."""
        return self.median(rival) / self.median(contender)

    def rate(self, contender: str) -> float:
        """The least traffic of the work over the contender's median, in bytes per second."""
        return self.work.least_bytes / self.median(contender)


class CopyMeter:
    """Measures torch's ``copy_`` between two buffers that no cache holds.

    Args:
        elements: fp32 elements per buffer; default: 32 Mi, 128 MiB a buffer.
    """

    def __init__(self, elements: int = 1 << 25) -> None:
        self._source = torch.ones(elements)
        self._target = torch.zeros(elements)
        self._seconds: list[float] = []

    def measure(self) -> None:
        """Time one copy."""
        start = time.perf_counter()
        self._target.copy_(self._source)
        self._seconds.append(time.perf_counter() - start)

    def take(self) -> float:
        """The median rate since the last call in bytes per second, reads and writes counted.

        NaN if nothing was measured since.
        """
        if not self._seconds:
            return float("nan")
        rate = 2 * self._source.nbytes / statistics.median(self._seconds)
        self._seconds.clear()
        return rate


class Contest:
    """The contenders of one work, ready to run on the same tensors.

    Args:
        work: what is measured.
        seed: seed of the tensors.

    A contender is built on first use, and on the first one after ``move()``, and does one untimed
    round. That round must change the tensors, so that nobody wins by doing nothing.
    """

    def __init__(self, work: Work, seed: int = 0) -> None:
        self.outcome = Outcome(work)
        self._rounds: dict[str, Round] = {}
        self._paces: dict[str, float] = {}
        self._arena: Arena | None = None
        self._seed = seed
        needed, free = work.bytes_needed(len(contenders_of(work))), available_bytes()
        if free is not None and needed > free:
            reason = f"needs {needed / 2**30:.0f} GiB of memory, {free / 2**30:.0f} GiB are free"
            self.outcome.absent = {c.name: reason for c in contenders_of(work)}

    def move(self) -> None:
        """Free all tensors: the contenders' next rounds are in other memory."""
        self._rounds.clear()
        self._arena = None
        gc.collect()

    def refill(self) -> None:
        """Restore the gradients; belongs before each round, untimed."""
        if self._arena is not None:
            self._arena.refill()

    def round_of(self, contender: Contender) -> Round | None:
        """The function to time; None where the contender is absent, with the reason noted."""
        if contender.name in self.outcome.absent:
            return None
        if contender.name not in self._rounds:
            if self._arena is None:
                self._arena = Arena(self.outcome.work, self._seed)
            try:
                round_ = contender.build(self._arena.parameters)
            except UnavailableError as reason:
                self.outcome.absent[contender.name] = str(reason)
                return None
            warm_up(contender.name, round_, self._arena)
            self._rounds[contender.name] = round_
            if contender.name not in self._paces:
                self._paces[contender.name] = timed(round_, self._arena)
        return self._rounds[contender.name]

    def rounds_in(self, seconds: float, contender: Contender, least: int, most: int) -> int:
        """How many rounds of a contender take about ``seconds``, by its first one."""
        return max(least, min(most, round(seconds / self._paces[contender.name])))

    def finish(self, meter: CopyMeter) -> Outcome:
        """Note the copy rate and the load, and return what was measured."""
        self.outcome.copy_rate = meter.take()
        if hasattr(os, "getloadavg"):
            self.outcome.load = os.getloadavg()[0]
        return self.outcome


def warm_up(name: str, round_: Round, arena: Arena) -> None:
    """Do one untimed round, which must have changed the tensors if that is its work."""
    arena.refill()
    before = arena.probe()
    round_()
    after = arena.probe()
    idle = arena.work.writes and torch.equal(before, after)
    if idle or not bool(torch.isfinite(after).all()):
        raise RuntimeError(f"{name} did not do the work {arena.work.key!r}")


def timed(round_: Round, arena: Arena) -> float:
    """The seconds of one round on restored gradients."""
    arena.refill()
    start = time.perf_counter()
    round_()
    return time.perf_counter() - start
