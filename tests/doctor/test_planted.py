"""Scripts with one cause each, which a run of them shows, and scripts that only look odd.

Here the doctor looks at one run of each. `test_doctor.py` has it try remedies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faststep.doctor.findings import suspects
from faststep.doctor.runs import Length, Runs
from faststep.doctor.sandbox import is_available

HERE = Path(__file__).parent
ON_RANKS = sorted((HERE / "planted_on_ranks").glob("*.py"))
PLANTED = sorted((HERE / "planted").glob("*.py")) + ON_RANKS
HEALTHY = sorted((HERE / "healthy").glob("*.py"))
Measured = Callable[[Path, float], dict[str, Any]]
SWITCHED = ("denormals", "page_faults")  # causes that only switches tell from others

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not is_available(), reason="no sandbox on this system"
)


@pytest.fixture
def measured(started_in: Path, runs_of: Callable[..., Runs]) -> Measured:
    """The result of a run of a script, which leaves nothing behind."""

    def measured(script: Path, seconds: float) -> dict[str, Any]:
        runs = runs_of(script, ranks=2 if script in ON_RANKS else 1)
        found = runs.measure(Length(seconds, 25), tries=script.stem in SWITCHED)
        assert not list(started_in.iterdir())
        return found

    return measured


@pytest.mark.parametrize("script", PLANTED, ids=lambda path: path.stem)
def test_the_cause_is_suspected_first(script: Path, measured: Measured) -> None:
    found = suspects(measured(script, 1.0))
    assert found, "nothing is suspected"
    assert found[0].cause == script.stem.partition("_by_")[0].replace("_", "-"), found


@pytest.mark.parametrize("script", HEALTHY, ids=lambda path: path.stem)
def test_nothing_is_wrong_with_what_looks_odd(script: Path, measured: Measured) -> None:
    found = suspects(measured(script, 2.0))
    assert not [one for one in found if one.is_error or not one.needs_trial], found
