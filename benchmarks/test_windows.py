"""Accumulation and release, measured in processes of their own; see windows.py and memory.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import memory
import windows
from bench_rows import SMOKE, window_works
from contenders import OURS
from contest import Ring
from figures import Figure
from memory import MODES
from timing import Outcome
from workloads import Work

MODELS = ("tiny",) if SMOKE else ("deep MLP", "GPT-2 small")


def rounds_of(work: Work) -> int:
    return 2 if SMOKE else {"sums": 9, "mean": 15, "release": 25}[work.family]


@pytest.mark.parametrize("work", window_works(), ids=lambda work: work.key.replace(" ", "_"))
def test_windows(ring: Ring, work: Work) -> None:
    rounds = rounds_of(work)
    if SMOKE:  # importing torch takes longer than all of it
        times = windows.measured(work.family, work.shapes, rounds)
    else:
        script = Path(__file__).with_name("windows.py")
        command = [sys.executable, script, work.family, work.label, str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        times = json.loads(done.stdout)
    assert len(times) == (3 if work.family == "sums" else 2)
    assert all(len(seconds) == rounds for seconds in times.values())
    assert OURS in times
    ring.note(Outcome(work, times, order=tuple(times)))


@pytest.mark.parametrize("model", MODELS)
def test_memory(ring: Ring, model: str) -> None:
    modes = (MODES[0], MODES[3])
    measure = memory.one if SMOKE else memory.measured
    plain, released = (measure(model, mode) for mode in modes)
    what = f"peak memory saved by release_gradients, {model}"
    share = 100.0 * memory.saved(plain, released)
    ring.figures.append(Figure(what, "% of the gradients' bytes", share, 90.0, at_least=True))
    assert SMOKE or released.peak < plain.peak
