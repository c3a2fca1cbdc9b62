"""Transforms of a batch of images, in which all contenders take turns."""

from __future__ import annotations

import pytest

from contenders import OURS
from cuda_contest import Budget, CudaOutcome
from cuda_images import run_image_contest
from cuda_timing import Timer
from cuda_works import TINY


def test_images(timer: Timer, budget: Budget, outcomes: list[CudaOutcome]) -> None:
    share = budget.next_work()
    if share <= 0.0:
        pytest.skip("the time is over")
    least, most = (1, 2) if TINY else (5, 50)
    outcome = run_image_contest(timer, share, least, most)
    outcomes.append(outcome)
    assert len(outcome.seconds[OURS]) >= least
