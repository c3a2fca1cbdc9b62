"""The tests of tests/gpu, which real hardware runs, on the fake machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_parts_run_on_the_fake_machine(tmp_path: Path) -> None:
    """What `make gpu` runs, of each kind of part; the benchmarks on tiny tensors."""
    fake.library()
    names = ["info", "kernels", "race", "bench-small", "bench-images"]
    command = [sys.executable, "-m", "gpu.run_parts", "--folder", str(tmp_path / "parts")]
    done = subprocess.run(
        [*command, "--results", str(tmp_path / "kept"), *names],
        cwd=fake.ROOT / "tests",
        env={**os.environ, "FASTSTEP_FAKE_GPU": "1", "FASTSTEP_EVERY": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    said = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("passed")]
    assert said == [["passed", name] for name in names]
    report = (tmp_path / "kept/report.md").read_text()
    assert "## bench-small: what it wrote" in report
    assert "torch, image by image" in report
    assert "300 x 1024, fp32" in report


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
