"""Watches a script while it trains: a line of figures per second."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

import torch
from torch.optim import Optimizer

from ..memory.activations import status
from .phases import Place
from .sampler import INTERVAL, Sampler

PERIOD = 1.0  # seconds of a line, if a step is not longer


class Figures(TypedDict):
    """A line, as the log has it.

    Attributes:
        time: seconds since 1970.
        step: how often the optimizer has stepped that steps most often.
        steps_per_second: since the line before.
        loss: what the newest backward pass began with; None if that was no single number.
        phases: the share of the time in each phase, since the line before.
        rss: bytes of memory that the process has.
        peak: the most bytes that it has had.
        cpu: seconds of processors per second, in all threads of the process.
        rank: of the process.
        gpu: `utilization` from 0 to 1 and `memory` in bytes of the whole device, by NVML.
    """

    time: float
    step: int
    steps_per_second: float
    loss: float | None
    phases: dict[str, float]
    rss: int
    peak: int
    cpu: float
    rank: int
    gpu: dict[str, float] | None


class Display:
    """Takes lines; in another thread than that which trains, but for the last one."""

    def show(self, figures: Figures) -> None:
        """Take a line."""

    def wait(self, phase: str, seconds: float) -> None:
        """Hear, every two seconds without a line, the phase and the seconds since the last step."""

    def close(self) -> None:
        """Come to an end."""


class _Steps(NamedTuple):
    """The steps of a line."""

    number: int  # of the last one
    per_second: float
    loss: float | None


class Watch:
    """Measures the thread that makes it, from the end of its first step on.

    Args:
        displays: what its lines are given to.
        say: is told what cannot be measured, and why.
        interval: seconds between two looks at the stack.
    """

    def __init__(
        self,
        displays: Sequence[Display],
        say: Callable[[str], object],
        interval: float = INTERVAL,
    ) -> None:
        self._displays, self._say = displays, say
        self._sampler = Sampler(interval, self._looked, self._stepped, self._lost)
        self._counts: Counter[int] = Counter()  # steps, by optimizer
        self._root: torch.Tensor | None = None
        self._begun: float | None = None  # when the steps of this line began
        self._steps: _Steps | None = None  # of a line that is to be shown
        self._seconds: dict[str, float] = defaultdict(float)
        self._looked_at = self._told_at = self._stepped_at = time.perf_counter()
        self._cpu = self._cpu_at = 0.0  # of the last line
        self._has_gpu = True
        self._process = os.getpid()

    def __enter__(self) -> None:
        self._sampler.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if os.getpid() != self._process:
            return  # a fork that has come to the end of the script
        self._sampler.stop()
        ends = max(self._sampler.ends.values(), key=len, default=[])
        if self._steps is None and len(ends) > 1:
            self._end_line(ends, reads=kind in (None, SystemExit))
        if self._steps is not None:
            self._show(self._steps)
        for one in self._displays:
            one.close()

    # ---- the thread that trains

    def _lost(self, root: torch.Tensor) -> None:
        self._root = root.detach()

    def _stepped(self, optimizer: Optimizer | None, ends: list[float]) -> None:
        self._stepped_at = ends[-1]
        self._counts[id(ends)] += 1
        if self._begun is None:
            self._begun = self._cpu_at = ends[-1]
            self._cpu = _cpu()
        elif ends[-1] - self._begun >= PERIOD and self._steps is None:
            most = max(map(len, self._sampler.ends.values()))
            if len(ends) == most > 1:
                self._end_line(ends)

    def _end_line(self, ends: list[float], reads: bool = True) -> None:
        """Let a line end here; the loss is read in this thread, which may capture a CUDA graph."""
        loss = _number(self._root) if reads else None
        rate = (len(ends) - 1) / (ends[-1] - ends[0])
        self._begun = ends[-1]
        self._steps = _Steps(self._counts[id(ends)], rate, loss)
        for some in self._sampler.ends.values():
            del some[:-1]

    # ---- the other thread

    def _looked(self, now: float, phase: str, inner: Place | None, outer: Place | None) -> None:
        if self._begun is not None:
            self._seconds[phase] += now - self._looked_at
        self._looked_at = now
        if self._steps is not None:
            self._show(self._steps)
            self._steps, self._told_at = None, now
        elif now - self._told_at > 2 * PERIOD:
            self._told_at = now
            for one in self._displays:
                one.wait(phase, now - self._stepped_at)

    def _show(self, steps: _Steps) -> None:
        figures = self._figures(steps)
        for one in self._displays:
            one.show(figures)

    def _figures(self, steps: _Steps) -> Figures:
        total = sum(self._seconds.values())
        shares = {name: some / total for name, some in self._seconds.items()}
        self._seconds.clear()
        cpu, now = _cpu(), time.perf_counter()
        used = (cpu - self._cpu) / (now - self._cpu_at)
        self._cpu, self._cpu_at = cpu, now
        rss = status("VmRSS")  # newer than what the kernel knows of the peak
        return {
            "time": time.time(),
            "step": steps.number,
            "steps_per_second": steps.per_second,
            "loss": steps.loss,
            "phases": shares,
            "rss": rss,
            "peak": max(rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
            "cpu": used,
            "rank": int(os.environ.get("RANK", "0")),
            "gpu": self._gpu(),
        }

    def _gpu(self) -> dict[str, float] | None:
        root = self._root
        if root is None or not root.is_cuda or not self._has_gpu:
            return None
        try:
            return {
                "utilization": torch.cuda.utilization(root.device) / 100,
                "memory": torch.cuda.device_memory_used(root.device),
            }
        except Exception as error:  # of NVML, or of a library that is missing
            self._has_gpu = False
            self._say(f"no figures of the GPU: {error} (nvidia-ml-py reads them)")
            return None


def _number(root: torch.Tensor | None) -> float | None:
    """The loss, where reading it does no more than wait for it."""
    is_plain = type(root) is torch.Tensor and root.device.type in ("cpu", "cuda")
    if root is None or not is_plain or root.is_complex():
        return None  # of a DTensor, say, whose ranks would have to meet
    if root.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return float(root)


def _cpu() -> float:
    """Seconds of processors that the process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
