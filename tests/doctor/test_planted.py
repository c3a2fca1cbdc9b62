"""Scripts with one cause each, which a run of them shows, and scripts that only look odd.

Here the doctor looks at one run of each. `test_doctor.py` has it try remedies.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from faststep.doctor.findings import suspects
from faststep.doctor.runs import Length, Runs
from faststep.doctor.sandbox import is_available

from .scripts import HEALTHY, ON_RANKS, PLANTED, written

Measured = Callable[..., dict[str, Any]]
# Causes that only switches tell from others, and the kinds of these.
SWITCHED = {"denormals": ["denormals"], "page-faults": ["memory"]}
# The clock of scripts that never wait: what other programs take of the cores is then no noise.
ALONE = "import time\ntime.perf_counter = time.process_time\n"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not is_available(), reason="no sandbox on this system"
)


@pytest.fixture
def measured(tmp_path: Path, started_in: Path, runs_of: Callable[..., Runs]) -> Measured:
    """The result of a run of a script, which leaves nothing behind."""

    def measured(
        body: str, seconds: float, ranks: int = 1, only: Sequence[str] = ()
    ) -> dict[str, Any]:
        runs = runs_of(written(tmp_path, body), ranks)
        found = runs.measure(Length(seconds, 25), tries=bool(only), only=only)
        assert not list(started_in.iterdir())
        return found

    return measured


@pytest.mark.parametrize("name", [*PLANTED, *ON_RANKS])
def test_the_cause_is_suspected_first(name: str, measured: Measured) -> None:
    body, ranks = (ON_RANKS[name], 2) if name in ON_RANKS else (PLANTED[name], 1)
    only = SWITCHED.get(name, [])
    found = suspects(measured(ALONE + body if only else body, 1.0, ranks, only))
    assert found, "nothing is suspected"
    assert found[0].cause == name.partition(" by ")[0], found


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_wrong_with_what_looks_odd(name: str, measured: Measured) -> None:
    found = suspects(measured(ALONE + HEALTHY[name], 2.0))
    assert not [one for one in found if one.is_error or not one.needs_trial], found
