"""The processes that all tests of sharding share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accumulate.processes import results_of


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """The results of a job by rank; all jobs of the modules that are tested are done at once."""
    jobs = {}
    for item in request.session.items:
        for job in getattr(getattr(item, "module", None), "ZERO_JOBS", ()):
            jobs[job.name] = job
    results = results_of(list(jobs.values()))
    return results.__getitem__
