"""One test for each work, in which all contenders take turns."""

from __future__ import annotations

import pytest

from contenders import OURS
from cuda_contest import Budget, CudaOutcome, run_cuda_contest
from cuda_timing import Timer
from cuda_works import TINY, cuda_works
from workloads import Work


@pytest.mark.parametrize("work", cuda_works(), ids=lambda work: work.key.replace(" ", "_"))
def test_work(work: Work, timer: Timer, budget: Budget, outcomes: list[CudaOutcome]) -> None:
    share = budget.next_work()
    if share <= 0.0:
        pytest.skip("the time is over")
    least, most = (1, 2) if TINY else (5, 50)
    outcome = run_cuda_contest(work, timer, budget, share, least, most)
    outcomes.append(outcome)
    if OURS in outcome.absent:
        pytest.skip(outcome.absent[OURS])
    assert len(outcome.seconds[OURS]) >= least
