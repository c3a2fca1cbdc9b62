"""The processes that the tests of a file share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accumulate.processes import results_of


@pytest.fixture(scope="module")
def on_ranks(request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """The results of a job by rank; a module lists its jobs in SHARDED."""
    return results_of(request.module.SHARDED).__getitem__
