"""One benchmark for each work, block and contender, in an order that lets contenders take turns."""

from __future__ import annotations

from typing import Any

import pytest

from bench_rows import all_works, plan_of, turns_of
from contenders import Contender
from contest import Ring
from workloads import Work


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = [
        pytest.param(
            work, block, contender, id=f"{work.key}-{block + 1}-{contender.name}".replace(" ", "_")
        )
        for work in all_works(int(metafunc.config.getoption("elements")))
        for block, contender in turns_of(work)
    ]
    metafunc.parametrize(("work", "block", "contender"), cases)


def test_work(benchmark: Any, ring: Ring, work: Work, block: int, contender: Contender) -> None:
    ring.measure(benchmark, work, block, contender, plan_of(work))
