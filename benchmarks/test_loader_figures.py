"""Loaders: time to the first batch, page faults, the state's size, a shuffle of 1e9 samples."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import faststep.data
from bench_rows import SMOKE
from contenders import OURS
from contest import Ring
from figures import Figure
from first_batch import THEIRS, seconds_of, seconds_to_first
from loader_rows import LOADER_WORKS, LoaderWork, Megabytes, images

ROUNDS = 3 if SMOKE else 12


def first_batches(work: LoaderWork, folder: Path) -> tuple[dict[str, list[float]], int]:
    """The times of ours and of torch's, and the number of workers."""
    if SMOKE:  # importing torch takes longer than all of it
        ours, workers = seconds_of(work, OURS, folder)
        shutil.rmtree(folder)
        folder.mkdir()
        return {OURS: [ours], THEIRS: [seconds_of(work, THEIRS, folder)[0]]}, workers
    script = Path(__file__).with_name("first_batch.py")
    command = [sys.executable, str(script), work.label, str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return answer["seconds"], answer["workers"]


@pytest.mark.parametrize("work", LOADER_WORKS, ids=lambda work: work.label.replace(" ", "_"))
def test_time_to_first_batch(ring: Ring, work: LoaderWork, tmp_path: Path) -> None:
    """Against torch's loader with as many workers; without any on the array path."""
    times, workers = first_batches(work, tmp_path)
    ratio = statistics.median(times[THEIRS]) / statistics.median(times[OURS])
    what = f"time to first batch, {work.label}: torch's to ours, {workers} workers"
    ring.figures.append(Figure(what, "x", ratio, 1.0, at_least=True))


def faults_of(pids: list[int]) -> int:
    """Minor page faults of processes so far."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(fields[7]) for fields in stats)


def faults_per_batch(loader: Any, warm: int, batches: int) -> float:
    stream = iter(loader)
    for _ in range(warm):
        next(stream)
    workers = [worker.pid for worker in getattr(stream, "_workers", [])]
    counts = []
    for _ in range(batches):
        before = faults_of([os.getpid(), *workers])
        next(stream)
        counts.append(faults_of([os.getpid(), *workers]) - before)
    return statistics.median(counts)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="faults are read from /proc")
def test_page_faults(ring: Ring, tmp_path: Path) -> None:
    dataset = images(tmp_path)
    rows = len(dataset)
    forever = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=20 * rows)
    loader = faststep.data.DataLoader(dataset, 32, sampler=forever)
    count = 10 if SMOKE else 200
    value = faults_per_batch(loader, 20, count)
    ring.figures.append(Figure("minor page faults per batch, array path", "faults", value, 0.0))
    loader = faststep.data.DataLoader(Megabytes(), 32, num_workers=2)
    value = faults_per_batch(loader, 5 if SMOKE else 30, 5 if SMOKE else 60)
    ring.figures.append(Figure("minor page faults per batch, 2 workers", "faults", value, 10.0))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="read from /proc")
def test_strings(ring: Ring, answer_of: Callable[..., Any]) -> None:
    count = 1000 if SMOKE else 1_000_000
    sizes = {kind: answer_of("string_memory.py", kind, count, 5) for kind in ("list", "frozen")}
    what = f"{count} strings, 2 workers, 5 epochs"
    growth = 100 * (sizes["frozen"][-1] / sizes["frozen"][0] - 1)
    theirs = sizes["list"][-1] / 1e6
    ring.figures += [
        Figure(
            f"{what}: PSS (a list in torch: {theirs:.0f})", "MB", sizes["frozen"][-1] / 1e6, 300
        ),
        Figure(f"{what}: growth after the first epoch", "%", growth, 1.0),
    ]


def test_size_and_time_of_the_state(ring: Ring) -> None:
    dataset = TensorDataset(torch.zeros(100_000, 8))
    loader = faststep.data.DataLoader(dataset, 32, shuffle=True)
    times = []
    for _, _ in zip(range(500), loader, strict=False):
        start = time.perf_counter()
        state = loader.state_dict()
        times.append(time.perf_counter() - start)
    ring.figures += [
        Figure("state_dict in each step", "us", statistics.median(times) * 1e6, 20.0),
        Figure("size of the state, pickled", "bytes", float(len(pickle.dumps(state))), 1000.0),
    ]


class Indices(Dataset[torch.Tensor]):
    """A sample for each of 1e9 indices."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def test_shuffle_of_a_billion(ring: Ring) -> None:
    dataset = Indices()
    times, grown = [], []
    for seed in range(ROUNDS):
        sampler = faststep.data.KeyedSampler(dataset, seed=seed)
        loader = faststep.data.DataLoader(dataset, 32, sampler=sampler)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        times.append(seconds_to_first(lambda loader=loader: loader))  # type: ignore[misc]
        grown.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    ring.figures += [
        Figure("shuffle of 1e9: time to first batch", "ms", statistics.median(times) * 1e3, 50.0),
        Figure("shuffle of 1e9: growth of peak RSS", "kB", statistics.median(grown), 1000.0),
    ]
