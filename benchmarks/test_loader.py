"""Batches of loaders: contenders take turns in blocks, one alone at a time."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from faststep.cli.contenders import OURS, UnavailableError
from faststep.cli.timing import Outcome
from faststep.cli.workloads import Work
from loader_works import BEST, LOADER_WORKS, LoaderWork, Stream
from ring import Ring
from slices import seconds_in_slices
from works import SMOKE

BLOCKS = 1 if SMOKE else 5
SETTLE = 8  # batches until a loader runs evenly
ENOUGH_SECONDS = 1.0  # of a block
RUNS_IN_SLICES = 4
SLICED_SECONDS = 0.5 if SMOKE else 8.0


def bytes_of(batch: Any) -> int:
    if isinstance(batch, (tuple, list)):
        return sum(map(bytes_of, batch))
    if isinstance(batch, dict):
        return sum(map(bytes_of, batch.values()))
    return int(batch.nbytes)


def block(stream: Stream, batches: int) -> float:
    """Seconds per batch."""
    for _ in range(min(SETTLE, batches)):
        next(stream)
    start, done = time.perf_counter(), 0
    while done < batches and time.perf_counter() - start < ENOUGH_SECONDS:
        next(stream)
        done += 1
    return (time.perf_counter() - start) / done


def best_of(outcome: Outcome, who: str) -> str:
    """The name with the best number of workers."""
    names = [name for name in outcome.seconds if name.split(",")[0] == who]
    return min(names, key=outcome.median)


def in_slices(work: LoaderWork, names: list[str], folder: Path) -> list[list[float]]:
    """The times of each, in several runs; who comes first changes from run to run."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for run in range(1 if SMOKE else RUNS_IN_SLICES):
        (place := folder / f"run {run}").mkdir()
        order = names[::-1] if run % 2 else names
        for name, seconds in seconds_in_slices(work.label, order, place, SLICED_SECONDS).items():
            times[name].append(seconds)
    return [times[name] for name in names]


@pytest.mark.parametrize("work", LOADER_WORKS, ids=lambda work: work.label.replace(" ", "_"))
def test_loader(ring: Ring, work: LoaderWork, tmp_path: Path) -> None:
    torch.manual_seed(0)
    outcome = Outcome(Work("loader", work.label, ()))
    streams = work.streams(work.dataset(tmp_path))
    for _ in range(BLOCKS):
        for name, make in streams.items():
            if name in outcome.absent:
                continue
            stream = make()
            try:
                size = bytes_of(next(stream))
            except UnavailableError as reason:
                outcome.absent[name] = str(reason)
                continue
            assert size > 0
            outcome.work = Work("loader", work.label, ((size // 4,),))
            seconds = block(stream, 3 if SMOKE else work.batches)
            outcome.seconds.setdefault(name, []).append(seconds)
            stream.close()  # ends workers and threads: nobody runs beside the next one
            gc.collect()
    names = [best_of(outcome, OURS), best_of(outcome, "torch")]
    times = [outcome.seconds[name] for name in names]
    if work.in_slices:
        times = in_slices(work, names, tmp_path)
    best = dict(zip((OURS, BEST), times, strict=True))
    outcome.seconds = {**best, **{k: v for k, v in outcome.seconds.items() if k != OURS}}
    outcome.order = (*outcome.seconds, *outcome.absent)
    ring.note(outcome)
