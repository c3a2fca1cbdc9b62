"""Runs of scripts by the doctor, all of them forked from one process."""

from __future__ import annotations

import functools
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faststep.doctor.runs import Runs
from faststep.run.program import Program
from programs import Programs

Faststep = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def faststep(programs: Programs, tmp_path: Path) -> Faststep:
    """Runs `python -m faststep` in the test's folder, in one thread: other tests run beside it."""
    return functools.partial(programs.faststep, tmp_path, OMP_NUM_THREADS="1")


@pytest.fixture(scope="package")
def started_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all scripts of `runs_of` run."""
    return tmp_path_factory.mktemp("started")


@pytest.fixture(scope="package")
def runs_of(started_in: Path) -> Iterator[Callable[..., Runs]]:
    """Makes `Runs` of a script, without the time that an import of torch takes."""
    first = Runs(Program("", []), 0.0, False, "namespaces")
    with pytest.MonkeyPatch.context() as changed:
        changed.chdir(started_in)
        # Other tests run beside these, and threads that wait for each other then take all the time.
        changed.setenv("OMP_NUM_THREADS", "1")
        first._server_with("")

    def made(script: Path, ranks: int = 1) -> Runs:
        runs = Runs(Program(str(script), []), time.monotonic() + 100, False, "namespaces", ranks)
        runs._servers = first._servers
        return runs

    yield made
    first._servers[""].kill()
