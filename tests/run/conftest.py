"""How the tests of this folder run a script."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from programs import Programs

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(programs: Programs, tmp_path: Path) -> Run:
    """Runs a script as `faststep run OPTIONS script.py ARGUMENTS`."""

    def call(
        source: str, *arguments: str, options: tuple[str, ...] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(source)
        code = "from faststep.cli import main\nraise SystemExit(main())"
        return programs.run(code, "run", *options, str(script), *arguments, **environment)

    return call
