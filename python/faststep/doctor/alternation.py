"""Remedies that are turned on and off between the steps of one run, and what each gains."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from .. import memory
from ..run.cores import counted
from ..run.optimizers import CLASSES
from .gains import Gain, compare
from .remedies import FASTSTEPS, FLUSHED, KEPT

__all__ = ["NOTHING", "NO_OPTIMIZER", "SAME_BATCH", "Alternation", "Switch", "switches"]

STRETCH = 4  # steps; the first after a change is not counted
LEAST_PAIRS, ENOUGH_PAIRS = 3, 6  # of stretches without and with
SECONDS, MOST_SECONDS = 1.0, 5.0  # for each switch
LEAST_SHARE = 0.04  # of a step, in which a switch must have something to gain
NOTHING = "nothing"
SAME_BATCH, NO_OPTIMIZER = "one batch again and again", "no optimizer"


class Switch(NamedTuple):
    """A change that can be made between two steps of a script that will not be kept.

    Attributes:
        name: of the remedy, or of what is left out.
        turn: called with True and False in turns, False last.
        in_one_thread: both sides compute in one thread, where a change is of one alone.
    """

    name: str
    turn: Callable[[bool], object]
    in_one_thread: bool = False


class Alternation:
    """Tries switches in stretches of steps: without, with, with, without, and so on.

    Attributes:
        gains: of each switch that had enough stretches.
    """

    def __init__(self, chosen: Sequence[Switch]) -> None:
        self.gains: dict[str, Gain] = {}
        self._waiting = list(chosen)
        self._is_on = False
        self._begun = self._last = time.perf_counter()
        self._count = 0  # steps
        self._stretch: list[float] = []
        self._stretches: tuple[list[float], list[float]] = ([], [])
        self._threads = torch.get_num_threads()
        self._begin()

    def is_over(self) -> bool:
        """After a step: note how long it took, and prepare the next one."""
        if not self._waiting:
            return True
        now = time.perf_counter()
        if self._count % STRETCH:
            self._stretch.append(now - self._last)
        self._count += 1
        if self._count % STRETCH == 0:
            self._stretches[self._is_on].append(statistics.median(self._stretch))
            self._stretch = []
            if self._is_enough(now):
                self._end()
                if not self._waiting:
                    return True
            else:
                self._turn(self._count // STRETCH % 4 in (1, 2))  # off, on, on, off
        self._last = time.perf_counter()
        return False

    def _begin(self) -> None:
        self._stretches, self._stretch, self._count = ([], []), [], 0
        self._begun = self._last = time.perf_counter()
        if self._waiting and self._waiting[0].in_one_thread:
            torch.set_num_threads(1)

    def _turn(self, is_on: bool) -> None:
        if is_on != self._is_on:
            self._waiting[0].turn(is_on)
            self._is_on = is_on

    def _is_enough(self, now: float) -> bool:
        pairs = min(map(len, self._stretches))
        if len(self._stretches[0]) != len(self._stretches[1]):
            return False
        seconds = now - self._begun
        return (pairs >= ENOUGH_PAIRS and seconds > SECONDS) or seconds > MOST_SECONDS

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


def switches(
    seconds: float,
    shares: dict[str, float],
    faults: float,
    cores: int,
    optimizers: Sequence[Optimizer],
    repeat_batch: Callable[[bool], object],
    stepped: Callable[[Optimizer], object],
) -> list[Switch]:
    """Those that may gain something for a script, and one that changes nothing.

    None for steps that are so long that stretches of them take more than the time of a switch.

    Args:
        seconds: of a step.
        shares: of a step, by phases.
        faults: the share of a step that page faults take.
        cores: that this process may use.
        optimizers: of the script.
        repeat_batch: lets loaders give the newest batch again and again.
        stepped: is told of a step that is left out.
    """
    if 2 * LEAST_PAIRS * STRETCH * seconds > 2 * MOST_SECONDS:
        return []
    chosen = [Switch(NOTHING, lambda is_on: None)]
    if faults > LEAST_SHARE and not memory.stats().retains:
        chosen.append(Switch(KEPT, _keep_memory))
    threads = torch.get_num_threads()
    for count in {1, cores}:
        if count < threads:
            chosen.append(Switch(counted(count), _set_threads(count, threads)))
    if shares.get("optimizer", 0.0) > LEAST_SHARE:
        chosen += _of_optimizers(optimizers, stepped)
    if shares.get("data", 0.0) > LEAST_SHARE:
        chosen.append(Switch(SAME_BATCH, repeat_batch))
    chosen.append(Switch(FLUSHED, torch.set_flush_denormal, in_one_thread=True))
    return chosen


def _set_threads(count: int, before: int) -> Callable[[bool], object]:
    return lambda is_on: torch.set_num_threads(count if is_on else before)


def _keep_memory(is_on: bool) -> None:
    if is_on:
        memory.retain()
    else:
        memory.undo()


def _of_optimizers(
    optimizers: Sequence[Optimizer], stepped: Callable[[Optimizer], object]
) -> Iterator[Switch]:
    known = [one for one in optimizers if type(one) in CLASSES]
    if known:
        yield Switch(FASTSTEPS, _exchange(known))
    yield Switch(NO_OPTIMIZER, _leave_out(optimizers, stepped))


def _exchange(optimizers: Sequence[Optimizer]) -> Callable[[bool], object]:
    """Let optimizers of torch have the steps of faststep's classes, on the same states."""
    kinds = [type(one) for one in optimizers]
    for kind in kinds:  # the first object of a class lets torch's hooks run around its steps
        CLASSES[kind]([torch.zeros(1, requires_grad=True)])

    def turn(is_on: bool) -> None:
        for optimizer, kind in zip(optimizers, kinds, strict=True):
            optimizer.__class__ = CLASSES[kind] if is_on else kind

    return _beside(optimizers, lambda optimizer: None, turn)


def _leave_out(
    optimizers: Sequence[Optimizer], stepped: Callable[[Optimizer], object]
) -> Callable[[bool], object]:
    """Let steps do nothing but call a closure."""

    def made(optimizer: Optimizer) -> Callable[..., Any]:
        def step(closure: Callable[[], Any] | None = None) -> Any:
            loss = None if closure is None else closure()
            stepped(optimizer)
            return loss

        return step

    return _beside(optimizers, made)


def _beside(
    optimizers: Sequence[Optimizer],
    made: Callable[[Optimizer], Callable[..., Any] | None],
    turn: Callable[[bool], object] = lambda is_on: None,
) -> Callable[[bool], object]:
    """Let optimizers have another `step` while a switch is on; that of their class for None."""
    before = [vars(one).get("step") for one in optimizers]  # what a scheduler has put there
    steps = [made(one) for one in optimizers]

    def turned(is_on: bool) -> None:
        turn(is_on)
        for optimizer, own, other in zip(optimizers, before, steps, strict=True):
            step = other if is_on else own
            if step is not None:
                optimizer.step = step  # type: ignore[method-assign]
            elif "step" in vars(optimizer):
                delattr(optimizer, "step")

    return turned
