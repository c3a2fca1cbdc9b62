"""The host's part of a CUDA step, measured without a GPU; see host.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench_rows import SMOKE, host_works
from contenders import OURS
from contest import Ring
from timing import Outcome
from workloads import Work

BLOCKS, ROUNDS = (1, 2) if SMOKE else (9, 11)


@pytest.mark.parametrize("work", host_works(), ids=lambda work: work.label.replace(" ", "_"))
def test_host_time(ring: Ring, answer_of: Callable[..., Any], work: Work) -> None:
    times = answer_of("host.py", len(work.shapes), BLOCKS, ROUNDS)
    assert {name: len(seconds) for name, seconds in times.items()} == {
        OURS: BLOCKS * ROUNDS,
        "torch fused": BLOCKS * ROUNDS,
    }
    ring.note(Outcome(work, times, order=tuple(times)))
