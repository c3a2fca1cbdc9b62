"""Batches of loaders, each work in a process of its own; see loaders.py and time_slices.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench_rows import SMOKE
from contenders import OURS
from contest import Ring
from loader_rows import BEST, LOADER_WORKS, LoaderWork
from loaders import Measured, measured
from time_slices import seconds_in_slices
from timing import Outcome
from workloads import Work

RUNS_IN_SLICES = 4
SLICED_SECONDS = 0.5 if SMOKE else 8.0


def in_blocks(work: LoaderWork, folder: Path) -> Measured:
    if SMOKE:  # importing torch takes longer than all of it
        return measured(work, folder)
    script = Path(__file__).with_name("loaders.py")
    command = [sys.executable, script, work.label, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Measured = json.loads(done.stdout.splitlines()[-1])
    return found


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
    found = in_blocks(work, tmp_path)
    size = found["bytes"]
    outcome = Outcome(Work("loader", work.label, ((size // 4,),)), found["seconds"])
    outcome.absent.update(found["absent"])
    names = [best_of(outcome, OURS), best_of(outcome, "torch")]
    times = [outcome.seconds[name] for name in names]
    if work.in_slices:
        times = in_slices(work, names, tmp_path)
    best = dict(zip((OURS, BEST), times, strict=True))
    outcome.seconds = {**best, **{k: v for k, v in outcome.seconds.items() if k != OURS}}
    outcome.order = (*outcome.seconds, *outcome.absent)
    ring.note(outcome)
