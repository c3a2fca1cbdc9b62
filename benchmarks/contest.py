"""Where the contenders of one work after another meet."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from bench_rows import SMOKE, Plan
from contenders import Contender
from figures import Figure
from timing import Contest, CopyMeter, Outcome
from workloads import Work

COPIES_PER_BLOCK = 2
ENOUGH_ROUNDS = 3
ENOUGH_SECONDS = 5.0
BLOCK_SECONDS = 0.0 if SMOKE else 0.15
MOST_ROUNDS = 50
BLOCKS_IN_PLACE = 3  # odd: with the order of a block's contenders alternates who is made first


class Ring:
    """Measures works one after another.

    Only one work's tensors live at a time; what was measured stays in ``outcomes`` and ``figures``.
    """

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.figures: list[Figure] = []
        self._contest: Contest | None = None
        self._meter: CopyMeter | None = None
        self._block = -1

    def measure(
        self, benchmark: Any, work: Work, block: int, contender: Contender, plan: Plan
    ) -> None:
        """Time one contender's rounds of one block; skips the test where it is absent.

        Contenders get the same time rather than the same number of rounds: else one that is short
        would run its few rounds in caches that another one left.
        """
        contest = self._enter(work, block)
        round_ = contest.round_of(contender)
        if round_ is None:
            pytest.skip(f"{contender.name}: {contest.outcome.absent[contender.name]}")
        times = contest.outcome.seconds.get(contender.name, [])
        if len(times) >= ENOUGH_ROUNDS and sum(times) > ENOUGH_SECONDS:
            pytest.skip(f"{contender.name}: {len(times)} rounds are enough of what is this slow")
        rounds = contest.rounds_in(BLOCK_SECONDS, contender, plan.rounds, MOST_ROUNDS)
        benchmark.group = work.key
        benchmark.extra_info.update(contender=contender.name, least_bytes=work.least_bytes)
        benchmark.pedantic(round_, setup=contest.refill, rounds=rounds, iterations=1)
        if benchmark.stats is not None:
            contest.outcome.seconds[contender.name] = [*times, *benchmark.stats.stats.data]

    def _enter(self, work: Work, block: int) -> Contest:
        if self._meter is None:
            self._meter = CopyMeter(1 << 16 if SMOKE else 1 << 25)
        if self._contest is None or self._contest.outcome.work is not work:
            self.leave()
            self._contest = Contest(work)
            self.outcomes.append(self._contest.outcome)
        elif self._block != block and block % BLOCKS_IN_PLACE == 0:
            self._contest.move()  # else a ratio is the luck of one placement
        if self._block != block:
            self._block = block
            for _ in range(COPIES_PER_BLOCK):
                self._meter.measure()
        return self._contest

    def note(self, outcome: Outcome) -> None:
        """Keep what was measured elsewhere."""
        self.leave()
        self.outcomes.append(outcome)

    def leave(self) -> None:
        """Free the current work's tensors and settle its copy rate."""
        if self._contest is not None and self._meter is not None:
            self._contest.finish(self._meter)
        self._contest, self._block = None, -1
        gc.collect()
