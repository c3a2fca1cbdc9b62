"""Measures a training script from inside, without a change of what it does.

A sampler looks at the script's stack every few milliseconds and notes steps and losses. Here they
are kept, with every DataLoader and autocast. The script ends when enough was seen.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import resource
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .._torch.data_loader import BaseDataLoaderIter
from ..run.cores import cores
from . import inspected
from .phases import Place
from .sampler import Sampler

__all__ = ["Recorder"]

INTERVAL = 0.01  # seconds between two looks at the stack
COUNTED = 0.05  # seconds between two looks at the counters of the kernel and the C library
WARM_UP = 3  # steps that are not measured
MOST_LOSSES = 64
MOST_LINES = 60
FLUSHED_STEPS = 4  # that follow each other
FLUSHED_SECONDS = 1.0


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


def _allocated() -> Callable[[], int]:
    """The function that says how many bytes the C library has given out; 0 without glibc."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return lambda: 0
    mallinfo2.restype = _Mallinfo2

    def count() -> int:
        found = mallinfo2()
        return int(found.uordblks + found.hblkhd)

    return count


class Counts(NamedTuple):
    """The counters of the kernel and the C library at some time."""

    seconds: float
    faults: int
    cpu: float
    allocated: int


class Flushing:
    """Lets denormal numbers be zero in every other step, and measures what that saves.

    torch sets this for one thread, so it computes in one alone from here on.
    """

    def __init__(self, now: float) -> None:
        torch.set_num_threads(1)
        self._begun = self._last = now
        self._is_on = False
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._count = 0

    def is_over(self, now: float) -> bool:
        """After a step: note how long it took, and prepare the next one."""
        if self._count % FLUSHED_STEPS:  # not the first after a change
            self._seconds[self._is_on].append(now - self._last)
        self._count += 1
        if self._count % FLUSHED_STEPS == 0:
            self._is_on = self._count // FLUSHED_STEPS % 4 in (1, 2)  # off, on, on, off
            torch.set_flush_denormal(self._is_on)
        self._last = time.perf_counter()
        done = self._count >= 4 * FLUSHED_STEPS and now - self._begun > FLUSHED_SECONDS
        return done or now - self._begun > 5 * FLUSHED_SECONDS

    def gain(self) -> float:
        """The ratio of the median seconds of steps without and with."""
        without, with_it = (sorted(some) for some in self._seconds)
        if min(len(without), len(with_it)) < FLUSHED_STEPS:
            return 1.0
        return without[len(without) // 2] / with_it[len(with_it) // 2]


class Recorder:
    """Measures the thread that makes it.

    Args:
        seconds: how long to measure after the first steps.
        least_steps: measure no fewer, if `most_seconds` allow them.
        most_seconds: end the script after these, from its start on.
        done: called with what was found, when enough was seen.
    """

    def __init__(
        self,
        seconds: float,
        least_steps: int,
        most_seconds: float,
        done: Callable[[dict[str, Any]], None],
    ) -> None:
        self._seconds, self._least_steps, self._most = seconds, least_steps, most_seconds
        self._done = done
        self._sampler = Sampler(INTERVAL, self._looked, self._stepped, self._lost)
        self._thread = threading.get_ident()
        self._begun = time.perf_counter()
        self._lock = threading.Lock()
        self._is_over = False
        self._samples: list[tuple[float, str, Place | None, Place | None]] = []
        self._counts: list[Counts] = []
        self._counted = 0.0
        self._optimizers: dict[int, Optimizer] = {}
        self._autocast_steps = 0
        self._autocasts: Counter[str] = Counter()
        self._losses: list[torch.Tensor] = []
        self._loaders: dict[int, inspected.LoaderUse] = {}
        self._allocated = _allocated()
        self._flushing: Flushing | None = None  # after what is measured otherwise
        self._stops_at = float("inf")
        self._leading: list[float] = []  # the steps of the optimizer that ended this
        self._threads = 0  # of torch

    def start(self) -> None:
        """Begin to measure."""
        self._watch_loaders()
        self._watch_autocast()
        self._sampler.start()

    # ---- what the script does

    def _lost(self, root: torch.Tensor) -> None:
        if len(self._losses) < MOST_LOSSES and self._flushing is None:
            self._losses.append(root.detach().clone())

    def _watch_loaders(self) -> None:
        make, following = DataLoader.__iter__, BaseDataLoaderIter.__next__

        def made(loader: Any) -> Any:
            use = self._loaders.setdefault(id(loader), inspected.LoaderUse(loader))
            begun = time.perf_counter()
            iterator = make(loader)
            use.begin(iterator, time.perf_counter() - begun)
            return iterator

        def timed(iterator: Any) -> Any:
            begun, is_last = time.perf_counter(), True
            try:
                batch = following(iterator)
                is_last = False
                return batch
            finally:
                inspected.LoaderUse.waited(iterator, time.perf_counter() - begun, is_last)

        DataLoader.__iter__ = made  # type: ignore[method-assign]
        BaseDataLoaderIter.__next__ = timed  # type: ignore[method-assign,assignment]

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
        now = steps[-1]
        if now - self._counted > COUNTED:
            self._counted = now
            used = resource.getrusage(resource.RUSAGE_SELF)
            cpu = used.ru_utime + used.ru_stime
            self._counts.append(Counts(now, used.ru_minflt, cpu, self._allocated()))
        if len(steps) == WARM_UP + 1:
            self._measured_from = now
        elif self._flushing is not None:
            if steps is self._leading and self._flushing.is_over(now):
                self.end()
        elif len(steps) > WARM_UP + self._least_steps and now - self._measured_from > self._seconds:
            self._stops_at = now
            self._threads = torch.get_num_threads()
            self._leading = steps
            self._flushing = Flushing(now)

    # ---- the other thread

    def _looked(self, now: float, phase: str, inner: Place | None, outer: Place | None) -> None:
        self._samples.append((now, phase, inner, outer))
        if now - self._begun > self._most:
            self.end()

    # ---- the end

    def end(self) -> None:
        """Hand over what was found; once."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._sampler.stop()
        self._done(self._found())

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
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "losses": [float(loss) for loss in self._losses],
            "autocast": dict(self._autocasts),
            "autocast_steps": self._autocast_steps,
            "flushed": 1.0 if self._flushing is None else self._flushing.gain(),
            "threads": self._threads,
            "cores": cores(inspected.PROCESS, inspected.SYSTEM),
        }
        found["phases"], found["lines"] = self._shares(first, last)
        found["evaluated"] = self._evaluated(kept)
        found["loaders"] = [use.described() for use in self._loaders.values()]
        found["optimizers"] = [
            inspected.described(optimizer, len(self._sampler.ends[key]))
            for key, optimizer in self._optimizers.items()
        ]
        found["graph"] = inspected.kept_graph(sys._current_frames().get(self._thread), len(steps))
        return found

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
