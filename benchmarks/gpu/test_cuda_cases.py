"""What is measured beside the steps, each in turns of all contenders."""

from __future__ import annotations

import time

import pytest

from contenders import OURS
from cuda_cases import CASES, Case
from cuda_contest import WARM_UP, Budget, CudaOutcome, take_turns
from cuda_timing import Timer
from cuda_works import TINY


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.work.key.replace(" ", "_"))
def test_case(case: Case, timer: Timer, budget: Budget, outcomes: list[CudaOutcome]) -> None:
    share = budget.next_work()
    if share <= 0.0:
        pytest.skip("the time is over")
    until = time.monotonic() + share
    rounds = case.rounds(timer.device)
    for round_ in rounds.values():
        for _ in range(WARM_UP):
            round_()
    outcome = CudaOutcome(case.work, order=tuple(rounds))
    outcomes.append(take_turns(outcome, rounds, timer, until, *((1, 2) if TINY else (5, 50))))
    assert outcome.seconds[OURS]
