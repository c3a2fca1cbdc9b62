"""`make bench` fails where our lead over the rivals has shrunk by more than noise."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import regressions
from programs import Programs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PUBLISHED = sorted(path for path in (BENCHMARKS / "results").glob("*.json"))


def slower(run: dict[str, Any], family: str, factor: float) -> dict[str, Any]:
    """The run with our times in a family multiplied."""
    changed = copy.deepcopy(run)
    for work in changed["works"]:
        if work["family"] == family:
            ours = work["seconds"]["faststep"]
            work["seconds"]["faststep"] = [t * factor for t in ours]
    return changed


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    """The newest with all rows of the AMP chain."""
    for path in reversed(PUBLISHED):
        results: dict[str, Any] = json.loads(path.read_text())
        if any(work["family"] == "chain" for work in results["works"]):
            return results
    raise AssertionError("no run with the AMP chain is published")


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_a_run_has_lost_nothing_against_itself(path: Path) -> None:
    results = json.loads(path.read_text())
    rows = regressions.compared(results, regressions.published(results, BENCHMARKS / "results"))
    assert rows
    assert not [row for row in rows if row.lost]
    assert "0 of" in regressions.regressions_text(rows, "this machine")


def test_a_family_that_takes_twice_as_long_is_found(run: dict[str, Any]) -> None:
    rows = regressions.compared(slower(run, "chain", 2.5), [run])
    large = [r for r in rows if r.name.startswith("chain, ") and r.kind == "large"]
    small = [r for r in rows if r.name.startswith("chain, 2000 x 64")]
    assert large
    assert small
    assert all(row.lost for row in large + small)
    assert not [row for row in rows if row.lost and not row.name.startswith("chain")]
    assert "LOST" in regressions.regressions_text(rows, "this machine")


def test_a_slow_minute_of_everybody_is_no_loss(run: dict[str, Any]) -> None:
    changed = copy.deepcopy(run)
    for work in changed["works"]:
        work["seconds"] = {name: [3 * t for t in ts] for name, ts in work["seconds"].items()}
    assert not [row for row in regressions.compared(changed, [run]) if row.lost]


def test_other_machines_are_not_compared(run: dict[str, Any]) -> None:
    other = {**run, "machine": "Some CPU, 2 threads, instruction set avx2; torch 9"}
    newer = {**run, "machine": run["machine"].split(";")[0] + "; torch 9"}
    folder = BENCHMARKS / "results"
    assert regressions.published(other, folder) == []
    assert regressions.published(newer, folder)
    assert "no results are published of Some CPU" in regressions.regressions_text(
        regressions.compared(other, []), regressions.kind_of_machine(other)
    )


def test_a_session_with_a_lost_row_fails(
    tmp_path: Path, programs: Programs, run: dict[str, Any]
) -> None:
    """The hook of benchmarks/conftest.py sets the exit status that make sees."""
    program = f"""
import json, pathlib, types, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import conftest
conftest.RESULTS = pathlib.Path({str(tmp_path)!r})
session = types.SimpleNamespace(exitstatus=0)
text = conftest._regressions(session, json.loads(sys.argv[1]))
print(text)
sys.exit(int(session.exitstatus))
"""
    (tmp_path / "2026-01-01-run.json").write_text(json.dumps(run))
    codes = []
    for results in (run, slower(run, "chain", 4.0)):
        small = {**results, "works": [w for w in results["works"] if w["family"] == "chain"][:3]}
        for work in small["works"]:
            work["seconds"] = {name: times[:20] for name, times in work["seconds"].items()}
        done = programs.run(program, json.dumps(small), FASTSTEP_BENCH_SMOKE="")
        codes.append(done.returncode)
        assert "rows lost more than noise explains" in done.stdout, done.stderr
    assert codes == [0, 1]
