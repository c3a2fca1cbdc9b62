"""Every kind of dataset, by torch's loader and ours: python benchmarks/loader_shapes.py [NAME...].

Samples take next to no time, so that the time is the loaders'. Both load an epoch in turns; the
worker stays for all epochs.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import faststep.data
from bench_rows import SMOKE
from faststep.cli.console import table

sys.path.append(str(Path(__file__).parents[1]))
from tests.data.shapes import SHAPES

__all__ = ["SHAPES", "Ratios", "ratios"]

BATCH, BATCHES, EPOCHS = (4, 3, 1) if SMOKE else (64, 150, 15)


class Ratios(NamedTuple):
    """How many times as long torch's loader takes as ours, in medians over epochs."""

    clock: float
    cpu: float  # of this process and the worker


def _cpu_seconds(workers: list[Any]) -> float:
    """Of all threads of this process and the workers so far."""
    clocks = ((~worker.pid << 3) | 2 for worker in workers)  # Linux's clock of another process
    return time.process_time() + sum(map(time.clock_gettime, clocks))


def ratios(name: str, workers: int) -> Ratios:
    kind, make, own = SHAPES[name]
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": workers, **own}
    options["persistent_workers"] = workers > 0
    count = BATCHES * (options["batch_size"] or 8)
    loaders = [
        module.DataLoader(kind(make, count), **options)
        for module in (torch.utils.data, faststep.data)
    ]
    times: tuple[list[tuple[float, float]], ...] = ([], [])
    for epoch in range(1 + EPOCHS):
        for loader, of in zip(loaders, times, strict=True):
            iterator = iter(loader)
            next(iterator)
            processes = getattr(iterator, "_workers", [])
            start, cpu = time.perf_counter(), _cpu_seconds(processes)
            for _ in iterator:
                pass
            if epoch:  # the first is for the caches
                of.append((time.perf_counter() - start, _cpu_seconds(processes) - cpu))
    theirs, ours = ([statistics.median(column) for column in zip(*of, strict=True)] for of in times)
    return Ratios(theirs[0] / ours[0], theirs[1] / ours[1])


def main(names: list[str]) -> None:
    rows = [
        [name, str(workers), *(f"{ratio:.2f}x" for ratio in ratios(name, workers))]
        for name in names or SHAPES
        for workers in (0, 1)
    ]
    print(table(["batches of", "workers", "torch's time to ours", "CPU time"], rows, False))


if __name__ == "__main__":
    main(sys.argv[1:])
