"""The clocks: device time by events, host time, launches, and the copy rate of the same minutes."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, Protocol

import torch

from contenders import Round
from timing import CopyMeter
from workloads import available_bytes

__all__ = ["CudaTimer", "HostTimer", "Timer"]

LONGEST_LEAD = 0.3


class Timer(Protocol):
    """What a contest asks of the device that it runs on."""

    device: str

    def free_bytes(self) -> int | None:
        """Memory that can be had."""

    def host_and_whole(self, round_: Round) -> tuple[float, float]:
        """Seconds until the call returns, and until the device is done, from an idle device."""

    def device_seconds(self, round_: Round, lead: float) -> float:
        """Seconds of the device; it is kept busy for the lead, so that the host is ahead of it."""

    def launches(self, round_: Round) -> int | None:
        """How many kernels run; None where nobody can tell."""

    def copy(self) -> None:
        """Measure the copy rate once."""

    def take_rate(self) -> float:
        """The median copy rate since the last call; bytes per second, reads and writes counted."""


class CudaTimer:
    """Measures on the current CUDA device and torch's current stream.

    Args:
        elements: fp32 elements of a buffer of the copies, which no cache should hold.
    """

    device = "cuda"

    def __init__(self, elements: int = 1 << 28) -> None:
        self._source = torch.ones(elements, device=self.device)
        self._target = torch.zeros(elements, device=self.device)
        self._copies: list[float] = []
        for _ in range(3):
            self.copy()
        self._copy_seconds = min(self._copies)
        self._copies.clear()

    def free_bytes(self) -> int | None:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def host_and_whole(self, round_: Round) -> tuple[float, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        round_()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        return returned - start, time.perf_counter() - start

    def device_seconds(self, round_: Round, lead: float) -> float:
        torch.cuda.synchronize()
        for _ in range(math.ceil(min(lead, LONGEST_LEAD) / self._copy_seconds)):
            self._target.copy_(self._source)
        return self._between_events(round_)

    def launches(self, round_: Round) -> int | None:
        profiler = torch.profiler
        activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
        torch.cuda.synchronize()
        with profiler.profile(activities=activities) as profile:
            round_()
            torch.cuda.synchronize()
        return kernels_among(list(profile.events() or ())) or None

    def copy(self) -> None:
        torch.cuda.synchronize()
        self._copies.append(self._between_events(lambda: self._target.copy_(self._source)))

    def take_rate(self) -> float:
        if not self._copies:
            return math.nan
        rate = 2 * self._source.nbytes / statistics.median(self._copies)
        self._copies.clear()
        return rate

    @staticmethod
    def _between_events(round_: Round) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        round_()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def kernels_among(events: list[Any]) -> int:
    """Kernels in a profile. Copies and fills are none, nor are ranges, which the host names too."""
    cuda = torch.autograd.DeviceType.CUDA
    ranges = {event.name for event in events if event.device_type != cuda}
    return sum(
        event.device_type == cuda
        and event.name not in ranges
        and not event.name.startswith(("Memcpy", "Memset"))
        for event in events
    )


class HostTimer:
    """The same on the CPU, for rehearsals."""

    device = "cpu"

    def __init__(self) -> None:
        self._meter = CopyMeter(1 << 16)

    def free_bytes(self) -> int | None:
        return available_bytes()

    def host_and_whole(self, round_: Round) -> tuple[float, float]:
        start = time.perf_counter()
        round_()
        seconds = time.perf_counter() - start
        return seconds, seconds

    def device_seconds(self, round_: Round, lead: float) -> float:
        return self.host_and_whole(round_)[0]

    def launches(self, round_: Round) -> int | None:
        round_()
        return None

    def copy(self) -> None:
        self._meter.measure()

    def take_rate(self) -> float:
        return self._meter.take()
