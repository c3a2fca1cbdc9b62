"""compute-sanitizer over every kernel: no access out of bounds, no race on shared memory, and no
barrier that some threads miss.

In a rehearsal AddressSanitizer and UBSan look at the simulator's kernels. The simulator itself
finds barriers that are missed, and tests/c/test_threads_cuda.c finds races.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from device import fake
from nvcc import PLACES

from .common import REHEARSAL

SANITIZER = shutil.which("compute-sanitizer", path=":".join(PLACES))
SECONDS = 180
# The slow tools take a part of the optimizers' cases, with all dtypes among them.
EVERY = {"memcheck": 1, "racecheck": 5, "synccheck": 5}


REHEARSED = """
import pytest
from device import fake
fake.LIBRARY = fake.LIBRARY.replace("build/c/", "build/c-address-undefined/")
from gpu import all_kernels, rehearsal
with pytest.MonkeyPatch.context() as patch, rehearsal.running(patch):
    all_kernels.main()
"""


@pytest.mark.skipif(not REHEARSAL, reason="there is a device")
def test_kernels_in_bounds_of_the_simulator() -> None:
    library = fake.LIBRARY.replace("/c/", "/c-address-undefined/")
    fake.build("SANITIZE=address,undefined", library)
    assert b"__asan_report_load" in (fake.ROOT / library).read_bytes()
    preloaded = [
        subprocess.run(["gcc", f"-print-file-name={name}.so"], capture_output=True, text=True)
        for name in ("libasan", "libstdc++")
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REHEARSED],
        cwd=Path(__file__).parents[1],
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(one.stdout.strip() for one in preloaded),
            "ASAN_OPTIONS": "detect_leaks=0",
            "FASTSTEP_FAKE_GPU": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert "launches, the bits of the CPU" in done.stdout


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
