"""Counts of instructions are compared so that a loop which does more fails."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import instructions


@pytest.fixture
def expected() -> Any:
    return json.loads(instructions.EXPECTED.read_text())


def test_the_expected_counts_hold_for_themselves(expected: Any) -> None:
    assert expected
    for key, counts in expected.items():
        assert instructions.compare(counts, expected, key) == []
        assert instructions.compare(counts, expected, "another compiler") == []


@pytest.mark.parametrize(("factor", "key"), [(1.03, None), (1.6, "another compiler")])
def test_more_instructions_fail(expected: Any, factor: float, key: str | None) -> None:
    mine, counts = next(iter(expected.items()))
    for level, passes in counts.items():
        name = next(iter(passes))
        largest = max(of.get(level, {}).get(name, 0) for of in expected.values())
        more = {**counts, level: {**passes, name: int(largest * factor)}}
        (fault,) = instructions.compare(more, expected, key or mine)
        assert fault.startswith(f"{level}, {name}: {int(largest * factor)} instructions")


def test_a_pass_without_an_expectation_fails(expected: Any) -> None:
    key, counts = next(iter(expected.items()))
    more = {level: {**passes, "new": 5} for level, passes in counts.items()}
    faults = instructions.compare(more, expected, key)
    assert any("make count-renew" in fault for fault in faults)
    assert any(", new: 5 instructions, at most 0" in fault for fault in faults)


def test_without_valgrind_it_says_so_and_fails(tmp_path: Path) -> None:
    (tmp_path / "cc").symlink_to(shutil.which("cc") or "/usr/bin/cc")
    done = subprocess.run(
        [sys.executable, instructions.__file__],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "valgrind is missing" in done.stdout
