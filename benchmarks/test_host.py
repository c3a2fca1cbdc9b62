"""The host's part of a CUDA step, measured without a GPU; see host.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench_rows import SMOKE, host_works
from contenders import OURS
from contest import Ring
from timing import Outcome
from workloads import Work

BLOCKS, ROUNDS = (1, 2) if SMOKE else (9, 11)


@pytest.mark.parametrize("work", host_works(), ids=lambda work: work.label.replace(" ", "_"))
def test_host_time(ring: Ring, work: Work) -> None:
    script = Path(__file__).with_name("host.py")
    command = [sys.executable, script, *map(str, (len(work.shapes), BLOCKS, ROUNDS))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    times = json.loads(done.stdout)
    assert {name: len(seconds) for name, seconds in times.items()} == {
        OURS: BLOCKS * ROUNDS,
        "torch fused": BLOCKS * ROUNDS,
    }
    ring.note(Outcome(work, times, order=tuple(times)))
