"""One work on CUDA: contenders on the same tensors, in turn round by round."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from contenders import OURS, Contender, Round, UnavailableError
from cuda_contenders import COMPILED, cuda_contenders_of
from cuda_timing import Timer
from timing import Outcome, warm_up
from workloads import Arena, Work

__all__ = ["Budget", "CudaOutcome", "free_all", "run_cuda_contest", "take_turns"]

WARM_UP = 3


@dataclass
class CudaOutcome(Outcome):
    """An outcome whose `seconds` are the device's.

    Args:
        host: seconds until the call returns.
        whole: seconds from an idle device until it is done.
        launches: kernels per round.
    """

    host: dict[str, list[float]] = field(default_factory=dict)
    whole: dict[str, list[float]] = field(default_factory=dict)
    launches: dict[str, int | None] = field(default_factory=dict)


class Budget:
    """The time that all works together may take, so that the run ends in time.

    Args:
        seconds: for all works.
        works: how many there are.
    """

    def __init__(self, seconds: float, works: int) -> None:
        self._end = time.monotonic() + seconds
        self._works = works
        self._per_tensor = 0.4  # a guess, until a compilation was timed

    def left(self) -> float:
        """Seconds until the end."""
        return self._end - time.monotonic()

    def next_work(self) -> float:
        """The share of a work that begins now."""
        self._works -= 1
        return max(0.0, self.left() / (self._works + 1))

    def refuse_to_compile(self, work: Work) -> str | None:
        """Why there is no time to compile; None where there is."""
        expected = self._per_tensor * len(work.shapes)
        if expected <= 0.4 * self.left():
            return None
        return f"not compiled: {len(work.shapes)} tensors would take {expected:.0f} s"

    def compiled(self, work: Work, seconds: float) -> None:
        """Note how long a compilation took."""
        self._per_tensor = seconds / len(work.shapes)


def _fitting(work: Work, contenders: tuple[Contender, ...], free: int | None) -> int:
    """How many contenders, from the first, the memory has room for."""
    count = len(contenders)
    while count and free is not None and work.bytes_needed(count) > free:
        count -= 1
    return count


def _build(contender: Contender, arena: Arena, budget: Budget) -> Round:
    """A contender that has done its work a few times; UnavailableError where it cannot."""
    if contender.name == COMPILED and (reason := budget.refuse_to_compile(arena.work)):
        raise UnavailableError(reason)
    start = time.monotonic()
    try:
        round_ = contender.build(arena.parameters)
        warm_up(contender.name, round_, arena)
        for _ in range(WARM_UP):
            arena.refill()
            round_()
    except torch.OutOfMemoryError as error:
        if contender.name == OURS:
            raise
        raise UnavailableError("out of memory") from error
    except Exception as error:
        if contender.name != COMPILED:
            raise
        # Its compiler may be missing on the machine.
        reason = next(iter(str(error).splitlines()), "")
        raise UnavailableError(f"failed: {type(error).__name__}: {reason[:120]}") from error
    if contender.name == COMPILED:
        budget.compiled(arena.work, time.monotonic() - start)
    return round_


def take_turns(
    outcome: CudaOutcome,
    rounds: Mapping[str, Round],
    timer: Timer,
    until: float,
    least: int,
    most: int,
    refill: Callable[[], None] = lambda: None,
) -> CudaOutcome:
    """Measure the rounds, one after the other in each turn.

    Args:
        outcome: what the figures are added to; it is returned.
        rounds: what each contender does.
        timer: the clocks of the device.
        until: no further turn begins after this time of `time.monotonic()`.
        least: turns to do even when they take longer.
        most: turns that are enough.
        refill: called before each round, untimed.
    """
    turns = 0
    while turns < least or (turns < most and time.monotonic() < until):
        for name, round_ in rounds.items():
            refill()
            host, whole = timer.host_and_whole(round_)
            outcome.host.setdefault(name, []).append(host)
            outcome.whole.setdefault(name, []).append(whole)
            refill()
            lead = 2e-3 + 1.5 * statistics.median(outcome.host[name])
            outcome.seconds.setdefault(name, []).append(timer.device_seconds(round_, lead))
        timer.copy()
        turns += 1
    for name, round_ in rounds.items():
        refill()
        outcome.launches[name] = timer.launches(round_)
    outcome.copy_rate = timer.take_rate()
    outcome.load = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
    return outcome


def run_cuda_contest(
    work: Work, timer: Timer, budget: Budget, seconds: float, least: int = 5, most: int = 50
) -> CudaOutcome:
    """Let the contenders take turns.

    Args:
        work: what is measured.
        timer: the clocks of the device.
        budget: whether there is time to compile.
        seconds: stop after the turn that passes this time, building included.
        least: turns to do even when they take longer.
        most: turns that are enough.
    """
    start = time.monotonic()
    contenders = cuda_contenders_of(work)
    outcome = CudaOutcome(work, order=tuple(c.name for c in contenders))
    free = timer.free_bytes()
    count = _fitting(work, contenders, free)
    for contender in contenders[count:]:
        needed = work.bytes_needed(contenders.index(contender) + 1)
        outcome.absent[contender.name] = (
            f"needs {needed / 2**30:.0f} GiB with those before it, "
            f"{(free or 0) / 2**30:.0f} are free"
        )
    if not count:
        return outcome
    arena = Arena(work, device=timer.device)
    rounds: dict[str, Round] = {}
    for contender in contenders[:count]:
        try:
            rounds[contender.name] = _build(contender, arena, budget)
        except UnavailableError as reason:
            outcome.absent[contender.name] = str(reason)
    return take_turns(outcome, rounds, timer, start + seconds, least, most, arena.refill)


def free_all() -> None:
    """Give back what the last work held."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
