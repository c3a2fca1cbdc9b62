"""What runs the tests of tests/gpu on real hardware, on the fake machine."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu import common, test_race

from . import fake


@pytest.mark.skipif(os.environ.get("FASTSTEP_FAKE_GPU") == "0", reason="it leaves them out")
def test_gpu_tests_run_here() -> None:
    """Without a GPU, too: a suite that skips all of them would pass."""
    assert common.why_not() is None


def test_parts_run_on_the_fake_machine(tmp_path: Path) -> None:
    """What `make gpu` runs, of each kind of part; the benchmarks on tiny tensors."""
    fake.library()
    names = ["info", "race", "bench-small", "bench-images"]
    command = [sys.executable, "-m", "gpu.run_parts", "--folder", str(tmp_path / "parts")]
    done = subprocess.run(
        [*command, "--results", str(tmp_path / "kept"), *names],
        cwd=fake.ROOT / "tests",
        env={**os.environ, "FASTSTEP_FAKE_GPU": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    said = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("passed")]
    assert said == [["passed", name] for name in names]
    report = (tmp_path / "kept/report.md").read_text()
    assert "## bench-small: what it wrote" in report
    assert "## bench-images: what it wrote" in report
    assert "torch, image by image" in report
    assert "300 x 1024, fp32" in report


class Stub:
    """Stands in for `Measured`: one launch among many leaves another norm."""

    def __init__(self, wrong: float | None) -> None:
        self.norm = torch.zeros((), dtype=torch.float64)
        self.launches, self.wrong = 0, wrong

    def launch(self) -> None:
        self.launches += 1
        is_wrong = self.wrong is not None and self.launches == 501
        self.norm.fill_(self.wrong if is_wrong else 2.0)

    more = launch  # of the copies


@pytest.mark.parametrize("wrong", [None, math.nan, 2.0 + 2**-51])
def test_one_wrong_launch_of_many_is_found(
    machine: fake.Machine, monkeypatch: pytest.MonkeyPatch, wrong: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", machine.synchronize)
    monkeypatch.setattr(test_race, "WATCHED", 1000)  # as on hardware
    stub, copies = Stub(wrong), Stub(None)
    if wrong is None:
        assert test_race.repeat(stub, 2 * test_race.WATCHED, copies) == 2.0
        assert copies.launches == 2 * test_race.WATCHED / test_race.COPY_EVERY
    else:
        with pytest.raises(AssertionError, match="1 of 1000 norms differ"):
            test_race.repeat(stub, 2 * test_race.WATCHED, copies)


def test_gpu_tests_are_skipped_with_a_reason_without_a_gpu() -> None:
    options = ["-q", "-rs", "-p", "no:cacheprovider", "tests/gpu/test_bits.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=fake.ROOT,
        env={**os.environ, "FASTSTEP_FAKE_GPU": "0", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"SKIPPED .*: (torch finds no CUDA device|this build .*)", done.stdout)
    assert "passed" not in done.stdout
