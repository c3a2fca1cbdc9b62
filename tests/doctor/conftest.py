"""Runs of scripts by the doctor, forked from one process for each kind of sandbox."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faststep.doctor.runs import Runs
from faststep.doctor.sandbox import Kind
from faststep.run.program import Program
from programs import MAIN, Programs

Faststep = Callable[..., subprocess.CompletedProcess[str]]


# A doctor that looks at seconds of a script for a fifth of the time.
HASTY = """
from faststep import doctor
doctor.FIRST, doctor.trials.SHORT = doctor.Length(1.2, 8, 0.5), doctor.Length(0.6, 5)
"""


@pytest.fixture
def faststep(programs: Programs, tmp_path: Path) -> Faststep:
    """Runs `python -m faststep` in the test's folder, in one thread: other tests run beside it."""

    def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        code = HASTY * (words[0] == "doctor") + MAIN
        given = map(str, (tmp_path, *words))
        return programs.run(code, *given, **{"OMP_NUM_THREADS": "1", **environment})

    return run


@pytest.fixture(scope="package")
def started_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all scripts of `runs_of` run."""
    return tmp_path_factory.mktemp("started")


@pytest.fixture(scope="package")
def runs_of(started_in: Path) -> Iterator[Callable[..., Runs]]:
    """Makes `Runs` of a script, without the time that an import of torch takes."""
    made: list[Runs] = []  # the one that has started a server ends it

    def make(script: Path, ranks: int = 1, kind: Kind = "namespaces") -> Runs:
        runs = Runs(Program(str(script), []), time.monotonic() + 100, False, kind, ranks)
        alike = [one for one in made if (one.sandbox == "namespaces") == (kind == "namespaces")]
        runs._servers = alike[0]._servers if alike else runs._servers
        made.append(runs)
        return runs

    with pytest.MonkeyPatch.context() as changed:
        changed.chdir(started_in)
        # Other tests run beside these, and threads that wait for each other then take all the time.
        changed.setenv("OMP_NUM_THREADS", "1")
        yield make
    for runs in made:
        for server in runs._servers.values():
            server.kill()
