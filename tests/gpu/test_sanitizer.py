"""compute-sanitizer over every kernel: no access out of bounds, no race on shared memory, and no
barrier that some threads miss.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nvcc import PLACES

from . import all_kernels
from .common import REHEARSAL

SANITIZER = shutil.which("compute-sanitizer", path=":".join(PLACES))
SECONDS = 180
# The slow tools take a part of the optimizers' cases, with all dtypes among them.
EVERY = {"memcheck": 1, "racecheck": 5, "synccheck": 5}


def test_the_script_itself(capsys: pytest.CaptureFixture[str]) -> None:
    all_kernels.main()
    assert "launches, the bits of the CPU" in capsys.readouterr().out


@pytest.mark.skipif(REHEARSAL or not SANITIZER, reason="compute-sanitizer is missing")
@pytest.mark.parametrize("tool", EVERY)
def test_kernels_under(tool: str) -> None:
    # Only our kernels are watched; without torch's cache every tensor is an allocation of its own.
    command = [str(SANITIZER), "--tool", tool, "--kernel-name", "kns=fst_", "--error-exitcode", "9"]
    command += ["--report-api-errors", "no"]  # torch asks for things that a device may not have
    done = subprocess.run(
        [*command, sys.executable, "-m", "gpu.all_kernels", "--every", str(EVERY[tool])],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert "launches, the bits of the CPU" in done.stdout
    assert re.search(r"SUMMARY: .*\b0 errors", done.stdout)
