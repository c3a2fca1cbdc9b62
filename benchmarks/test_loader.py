"""Batches of loaders: contenders take turns in blocks on live streams."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from faststep.cli.contenders import OURS, UnavailableError
from faststep.cli.timing import Outcome
from faststep.cli.workloads import Work
from loader_works import LOADER_WORKS, LoaderWork, Stream
from ring import Ring
from works import SMOKE

BLOCKS = 1 if SMOKE else 5
TORCH = "torch"
SETTLE = 8  # batches that were loaded ahead while others were measured
ENOUGH_SECONDS = 0.6  # of a block


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


def best_of(outcome: Outcome, who: str) -> list[float]:
    """The times of the best number of workers."""
    names = [name for name in outcome.seconds if name.split(",")[0] == who]
    return outcome.seconds[min(names, key=outcome.median)]


@pytest.mark.parametrize("work", LOADER_WORKS, ids=lambda work: work.label.replace(" ", "_"))
def test_loader(ring: Ring, work: LoaderWork, tmp_path: Path) -> None:
    torch.manual_seed(0)
    outcome = Outcome(Work("loader", work.label, ()))
    streams: dict[str, Stream] = {}
    for name, make in work.streams(work.dataset(tmp_path)).items():
        try:
            streams[name] = make()
            first = next(streams[name])
        except UnavailableError as reason:
            outcome.absent[name] = str(reason)
            del streams[name]
            continue
        size = bytes_of(first)
        outcome.work = Work("loader", work.label, ((size // 4,),))
        assert size > 0
    for _ in range(BLOCKS):
        for name, stream in streams.items():
            seconds = block(stream, 3 if SMOKE else work.batches)
            outcome.seconds.setdefault(name, []).append(seconds)
    while streams:
        streams.popitem()[1].close()
    best = {who: best_of(outcome, who) for who in (OURS, TORCH)}
    outcome.seconds = {**best, **{k: v for k, v in outcome.seconds.items() if k != OURS}}
    outcome.order = (*outcome.seconds, *outcome.absent)
    ring.note(outcome)
