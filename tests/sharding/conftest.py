"""The processes that the tests of sharded parameters share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accumulate.processes import results_of


@pytest.fixture(scope="session")
def on_ranks(request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """The results of a job by rank; a module lists its jobs in SHARDED."""
    jobs = {}
    for item in request.session.items:
        for job in getattr(getattr(item, "module", None), "SHARDED", ()):
            jobs[job.name] = job
    results = results_of(list(jobs.values()))
    return results.__getitem__
