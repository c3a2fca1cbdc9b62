"""The tests of tests/gpu, which real hardware runs, on the fake machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from . import fake


def test_gpu_tests_pass_on_the_fake_machine() -> None:
    fake.library()  # builds it
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=fake.ROOT,
        env={**os.environ, "FASTSTEP_FAKE_GPU": "1", "FASTSTEP_EVERY": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed, skipped = (int(n) for n in re.findall(r"(\d+) (?:passed|skipped)", done.stdout))
    assert passed > 10 * skipped


def test_gpu_tests_are_skipped_with_a_reason_without_a_gpu() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "FASTSTEP_FAKE_GPU"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=fake.ROOT,
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"SKIPPED .*: (torch finds no CUDA device|this build .*)", done.stdout)
    assert "passed" not in done.stdout
