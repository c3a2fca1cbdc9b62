"""Measures a training script from inside, without a change of what it does.

A sampler looks at the script's stack every few milliseconds and notes steps and losses. Here they
are kept, with every DataLoader and autocast. The script ends when enough was seen.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import itertools
import os
import resource
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..memory.activations import status
from ..run.cores import cores
from . import gpu, inspected, rates, system
from .alternation import Alternation
from .phases import Place
from .sampler import Sampler
from .second_loader import ScriptLoaders
from .switches import switches

INTERVAL = 0.01  # seconds between two looks at the stack
COUNTED, SELDOM = 0.05, 1.5  # seconds between looks at counters of the kernel and the C library
SPARED = 200  # times what such a look takes, until the next: the C library adds up all free blocks
WARM_UP = 3  # steps that are not measured
STUCK = 12.0  # seconds of a step while switches are turned
MOST_LOSSES = 64
MOST_LINES = 60


class _Mallinfo2(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _allocated() -> Callable[[], int]:
    """The function that says how many bytes the C library has given out; 0 without glibc."""
    mallinfo2: Any = getattr(ctypes.CDLL(None), "mallinfo2", _Mallinfo2)
    mallinfo2.restype = _Mallinfo2

    def count() -> int:
        found = mallinfo2()
        return int(found.uordblks + found.hblkhd)

    return count


def _grad_of(optimizer: Optimizer | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A parameter that has a gradient, and this."""
    for group in [] if optimizer is None else optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                return param, param.grad
    return None


class Counts(NamedTuple):
    """The counters of the kernel and the C library at some time."""

    seconds: float
    faults: int
    cpu: float
    allocated: int


class Recorder:
    """Measures the thread that makes it.

    Args:
        seconds: how long to measure after the first steps.
        least_steps: measure no fewer, if there is time for them.
        most_seconds: end the script after these, from its start on.
        until: `time.monotonic()` at which it ends at the latest.
        tries: turn switches on and off after that, see `switches`.
        done: called with what was found, when enough was seen.
        only: kinds of remedies that are tried; all if none is named.
    """

    def __init__(
        self,
        seconds: float,
        least_steps: int,
        most_seconds: float,
        until: float,
        tries: bool,
        done: Callable[[dict[str, Any]], None],
        only: Collection[str] = (),
    ) -> None:
        self._seconds, self._least_steps, self._until = seconds, least_steps, until
        self._most = most_seconds
        self._done, self._tries, self._only = done, tries, only
        self._sampler = Sampler(INTERVAL, self._looked, self._stepped, self._lost)
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._begun = self._stepped_at = time.perf_counter()
        self._lock = threading.Lock()
        self._is_over = False
        self._samples: list[tuple[float, str, Place | None, Place | None]] = []
        self._counts: list[Counts] = []
        self._counts_at = 0.0
        self._optimizers: dict[int, Optimizer] = {}
        self._autocast_steps = 0
        self._autocasts: Counter[str] = Counter()
        self._losses: list[torch.Tensor] = []
        self._loop = ScriptLoaders()
        self._allocated = _allocated()
        self._alternation: Alternation | None = None  # after what is measured otherwise
        self._collecting = self._collects_since = 0.0  # seconds, of the garbage collector
        self._grad: tuple[torch.Tensor, torch.Tensor] | None = None  # with its parameter
        self._zeroes = False
        self._products: rates.Products | None = None
        self._result: dict[str, Any] | None = None  # of what came before
        self._stops_at = float("inf")
        self._leading: list[float] = []  # the steps of the optimizer that ended this
        self._threads = 0  # of torch
        self._measured_from: float | None = None
        self._busy = 0.0, 0.0

    @property
    def is_measured(self) -> bool:
        """True when only switches are left to be tried."""
        return self._result is not None

    def start(self) -> None:
        """Begin to measure."""
        self._loop.watch()
        gc.callbacks.append(self._collected)
        self._watch_autocast()
        self._sampler.start()

    # ---- what the script does

    def _lost(self, root: torch.Tensor) -> None:
        if len(self._losses) < MOST_LOSSES and self._alternation is None:
            self._losses.append(root.detach().clone())

    def _watch_autocast(self) -> None:
        enter = torch.autocast.__enter__

        def entered(context: Any) -> Any:
            if getattr(context, "_enabled", True):
                self._autocasts[str(context.fast_dtype).removeprefix("torch.")] += 1
            return enter(context)  # type: ignore[no-untyped-call]

        torch.autocast.__enter__ = entered  # type: ignore[method-assign]

    def _stepped(self, optimizer: Optimizer | None, steps: list[float]) -> None:
        if optimizer is not None:
            self._optimizers[id(optimizer)] = optimizer
            self._autocast_steps += torch.is_autocast_enabled("cpu")
        now = self._stepped_at = steps[-1]
        if now > self._counts_at:
            begun = time.thread_time()
            used = resource.getrusage(resource.RUSAGE_SELF)
            cpu = used.ru_utime + used.ru_stime
            self._counts.append(Counts(now, used.ru_minflt, cpu, self._allocated()))
            taken = time.thread_time() - begun
            self._counts_at = now + min(max(COUNTED, SPARED * taken), SELDOM)
        if self._grad is not None:
            param, before = self._grad
            self._zeroes, self._grad = param.grad is before, None
        if len(steps) == WARM_UP + 1:
            self._measured_from = now
            self._busy = system.busy_seconds()
            self._collecting = 0.0
            self._grad = _grad_of(optimizer)
        elif self._alternation is not None:
            if steps is self._leading and self._alternation.is_over():
                self._count_products()
        elif (
            len(steps) > WARM_UP + self._least_steps
            and now - (self._measured_from or now) > self._seconds
        ):
            self._stops_at = now
            self._threads = torch.get_num_threads()
            self._leading = steps
            if not self._tries:
                self.end()
                return
            self._result = self._found()
            optimizers, stepped = [*self._optimizers.values()], self._sampler.note_step
            chosen = switches(self._result, optimizers, self._loop, stepped, self._only)
            self._loop.keeps = True
            self._alternation = Alternation(chosen, statistics.fmean(self._result["steps"]))

    def _collected(self, phase: str, _: object) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._collects_since = now
        else:
            self._collecting += now - self._collects_since

    def _count_products(self) -> None:
        """In the step after all others; then the end."""
        if self._products is None:
            self._products = rates.Products()
            self._products.__enter__()  # type: ignore[no-untyped-call]
            return
        self._products.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._result is not None:
            self._result["machine"] = rates.measured(self._products)
        self.end()

    # ---- the other thread

    def _looked(self, now: float, phase: str, inner: Place | None, outer: Place | None) -> None:
        self._samples.append((now, phase, inner, outer))
        tries = self._alternation is not None and self._products is None
        is_stuck = tries and now - self._stepped_at > STUCK  # workers of another loader, say
        is_late = now - self._begun > self._most or time.monotonic() > self._until
        if is_stuck or is_late:
            self.end()

    # ---- the end

    def end(self) -> None:
        """Hand over what was found; once, and not in a fork of the script."""
        is_here = threading.get_ident() == self._thread
        if os.getpid() != self._process or not self._lock.acquire(blocking=is_here):
            return
        try:  # the script's thread waits here for the other one
            if self._is_over:
                return
            self._is_over = True
            self._sampler.stop()
            found = self._result or self._found()
            if self._alternation is not None:
                found["switched"] = self._alternation.gains
                found["tried_for"] = time.perf_counter() - self._stops_at
            self._done(found)
        finally:
            self._lock.release()

    def _found(self) -> dict[str, Any]:
        self._threads = self._threads or torch.get_num_threads()
        steps = max(self._sampler.ends.values(), key=len, default=[])
        steps = [end for end in steps if end <= self._stops_at]
        kept = steps[WARM_UP:] if len(steps) > 2 * WARM_UP else steps
        first, last = (kept[0], kept[-1]) if kept else (self._begun, time.perf_counter())
        counts = [one for one in self._counts if first <= one.seconds <= last]
        span = counts[-1].seconds - counts[0].seconds if len(counts) > 1 else 0.0
        per_second = (counts[-1].faults - counts[0].faults) / span if span else 0.0
        found: dict[str, Any] = {
            "steps": [after - before for before, after in itertools.pairwise(kept)],
            "faults": per_second,
            "allocated": [one.allocated for one in counts],
            "cpu": (counts[-1].cpu - counts[0].cpu) / span if span else 0.0,
            "peak": status("VmHWM"),  # maxrss has that of the parent, too
            "losses": [float(loss) for loss in self._losses],
            "autocast": dict(self._autocasts),
            "autocast_steps": self._autocast_steps,
            "swapped": status("VmSwap"),
            "others": self._others(),
            "switched": {},
            "tried_for": 0.0,
            "machine": {},
            "ranks": [],
            "gpu": gpu.described(self._optimizers.values()),
            "collecting": self._collecting / max(last - first, 1e-9),
            "zeroes": self._zeroes,
            "cuda": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
            "threads": self._threads,
            "cores": cores(inspected.PROCESS, inspected.SYSTEM),
        }
        found["phases"], found["lines"] = self._shares(first, last)
        self._move_waits(found)
        found["evaluated"] = self._evaluated(kept)
        found["loaders"] = [use.described() for use in self._loop.uses.values()]
        found["optimizers"] = [
            inspected.described(optimizer, len(self._sampler.ends[key]))
            for key, optimizer in self._optimizers.items()
        ]
        # Variables of a thread that runs cannot be read: CPython 3.11 crashes.
        is_here = threading.get_ident() == self._thread
        found["graph"] = inspected.kept_graph(sys._getframe() if is_here else None, len(steps))
        return found

    def _move_waits(self, found: dict[str, Any]) -> None:
        """Let what models wait for each other in backward, below Python, be communication."""
        exposed, phases = inspected.exposed(), found["phases"]
        found["is_ddp"] = exposed is not None
        waited = min((exposed or 0.0) * len(found["steps"]), phases.get("backward", 0.0))
        if waited:
            phases["backward"] -= waited
            phases["communication"] = phases.get("communication", 0.0) + waited

    def _others(self) -> float:
        """The cores that other programs have used meanwhile."""
        if self._measured_from is None:
            return 0.0
        busy, own = system.busy_seconds()
        before, own_before = self._busy
        seconds = time.perf_counter() - self._measured_from
        return max(0.0, (busy - before) - (own - own_before)) / seconds

    def _evaluated(self, ends: list[float]) -> float:
        """The share of steps in which an evaluation was seen, of those that were looked at."""
        seen: dict[int, bool] = defaultdict(bool)
        for now, phase, *_ in self._samples:
            seen[bisect.bisect(ends, now)] |= phase == "evaluation"
        return sum(seen.values()) / len(seen) if seen else 0.0

    def _shares(self, first: float, last: float) -> tuple[dict[str, float], list[Any]]:
        """The seconds in each phase, and in each line of it."""
        seconds: dict[str, float] = defaultdict(float)
        lines: dict[tuple[str, Place | None, Place | None], float] = defaultdict(float)
        before = first
        for now, phase, inner, outer in self._samples:
            if first < now <= last:
                seconds[phase] += now - before
                lines[phase, inner, outer] += now - before
                before = now
        dearest = sorted(lines.items(), key=lambda one: -one[1])[:MOST_LINES]
        return dict(seconds), [[*key, value] for key, value in dearest]
