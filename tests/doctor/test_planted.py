"""Scripts with one cause each, which a run of them shows, and scripts that only look odd.

Here the doctor looks at one run of each. `test_doctor.py` has it try remedies.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from faststep.doctor.findings import suspects
from faststep.doctor.runs import Length, Runs
from faststep.doctor.sandbox import is_available
from faststep.run.program import Program

HERE = Path(__file__).parent
ON_RANKS = sorted((HERE / "planted_on_ranks").glob("*.py"))
PLANTED = sorted((HERE / "planted").glob("*.py")) + ON_RANKS
HEALTHY = sorted((HERE / "healthy").glob("*.py"))
SWITCHED = ("denormals", "page_faults")  # causes that only switches tell from others

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not is_available(), reason="no sandbox on this system"
)


def measured(script: Path) -> dict[str, Any]:
    ranks = 2 if script in ON_RANKS else 1
    runs = Runs(Program(str(script), []), time.monotonic() + 60, False, "namespaces", ranks)
    return runs.measure(Length(2.0, 25), tries=script.stem in SWITCHED)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Other tests run beside these, and threads that wait for each other then take all the time.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("script", PLANTED, ids=lambda path: path.stem)
def test_the_cause_is_suspected_first(script: Path, tmp_path: Path) -> None:
    found = suspects(measured(script))
    assert found, "nothing is suspected"
    assert found[0].cause == script.stem.partition("_by_")[0].replace("_", "-"), found
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", HEALTHY, ids=lambda path: path.stem)
def test_nothing_is_wrong_with_what_looks_odd(script: Path, tmp_path: Path) -> None:
    found = suspects(measured(script))
    assert not [one for one in found if one.is_error or not one.needs_trial], found
    assert not list(tmp_path.iterdir())
