"""What runs the tests of tests/gpu on real hardware, on the fake machine."""

import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from gpu import test_race
from programs import Programs

from . import fake

EACH_FILE = fake.ROOT / "tests/gpu/each_file"


def each_file(
    results: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What `make gpu` calls."""
    given = {"PYTHON": sys.executable, "PACKAGE": "python", "RESULTS": str(results), "LIMIT": "180"}
    return subprocess.run(
        [str(EACH_FILE), *arguments],
        env={**os.environ, **given, "FASTSTEP_FAKE_GPU": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_file_on_the_fake_machine(tmp_path: Path) -> None:
    """Benchmarks on tiny tensors, which write their figures beside the logs."""
    fake.library()
    done = each_file(tmp_path, "benchmarks/gpu/test_cuda_cases.py")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"^cuda_cases +\d+ s  status 0  .* passed", done.stdout, re.MULTILINE)
    assert (tmp_path / "report.txt").read_text() == done.stdout
    assert "torch, image by image" in (tmp_path / "cuda_cases.md").read_text()


@pytest.mark.slow
def test_a_file_that_hangs_or_crashes_costs_the_others_nothing(tmp_path: Path) -> None:
    """The hanging file has its `timeout` take the limit for over."""
    bodies = {
        "hangs": "os.kill(os.getppid(), signal.SIGALRM), time.sleep(600)",
        "crashes": "os.kill(os.getpid(), 11)",
        "passes": 'assert "150" in open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")',
    }
    for name, body in bodies.items():
        text = f"import os, signal, time\n\ndef test_it():\n    {body}\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    files = [str(tmp_path / f"test_{name}.py") for name in bodies]
    done = each_file(tmp_path / "results", *files, "--", "-p", "no:randomly", LIMIT="150")
    assert done.returncode == 1
    found = re.findall(r"^(\w+) +\d+ s  status (\d+)", done.stdout, re.MULTILINE)
    assert found == [("hangs", "124"), ("crashes", "139"), ("passes", "0")]
    assert done.stdout.count("line 4 in test_it") == 2
    for name in ("hangs", "crashes"):
        log = (tmp_path / f"results/{name}.log").read_text()
        assert re.search(rf"test_{name}.py.* line 4 in test_it", log.replace('", ', " ")), log


def test_files_behind_the_budget_are_named(tmp_path: Path) -> None:
    for name, body in {"first": "time.sleep(60)", "second": "pass"}.items():
        (tmp_path / f"test_{name}.py").write_text(f"import time\n\ndef test_it():\n    {body}\n")
    files = [str(tmp_path / f"test_{name}.py") for name in ("first", "second")]
    done = each_file(tmp_path / "results", *files, "--", "-p", "no:randomly", BUDGET="3")
    assert done.returncode == 1
    assert re.search(r"^first +\d+ s  status 124", done.stdout, re.MULTILINE)
    assert re.search(r"^second +not run: the budget of 3 s is spent", done.stdout, re.MULTILINE)


def test_a_build_that_fails_takes_the_wheel(tmp_path: Path) -> None:
    """Without one `make` stops. The Makefile is that of the tree, in a folder of its own."""
    shutil.copy(fake.ROOT / "Makefile", tmp_path)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = setup.py ] && exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)

    def make() -> subprocess.CompletedProcess[str]:
        command = ["make", "-s", "build-gpu", f"PYTHON={python}"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = make()
    assert done.returncode != 0
    assert "nothing could be built, and there is no wheel in dist" in done.stdout
    (tmp_path / "dist").mkdir()
    with zipfile.ZipFile(tmp_path / "dist/faststep-1.whl", "w") as wheel:
        wheel.writestr("faststep/__init__.py", "")
    done = make()
    assert done.returncode == 0, done.stderr
    assert "nothing could be built: taking dist/faststep-1.whl" in done.stdout
    assert (tmp_path / "build/package").read_text() == "build/wheel\n"
    assert (tmp_path / "build/wheel/faststep/__init__.py").exists()


def test_the_order_of_make_gpu() -> None:
    """Bits, then figures; what needs tools of its own comes last, and every file comes once."""
    command = ["make", "-s", "-n", "-o", "build-gpu", "gpu", "PARTS="]
    done = subprocess.run(command, cwd=fake.ROOT, capture_output=True, text=True, check=True)
    files = re.findall(r"test_(\w+)\.py", done.stdout)
    assert files[:6] == ["bits", "lists", "amp", "graphs", "streams", "cuda_works"]
    assert files[-2:] == ["sanitizer", "counters"]
    for folder in ("tests/gpu", "benchmarks/gpu"):
        for path in (fake.ROOT / folder).glob("test_*.py"):
            assert done.stdout.split().count(f"{folder}/{path.name}") == 1


def test_a_real_device_that_is_asked_for_must_be_there(programs: Programs) -> None:
    """A suite that skips all of them would pass."""
    code = "import sys, pytest\nraise SystemExit(pytest.main(sys.argv[1:]))"
    words = ("-q", "-p", "no:cacheprovider", "--co", f"{fake.ROOT}/tests/gpu/test_kernels.py")
    done = programs.run(code, *words, FASTSTEP_FAKE_GPU="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert re.search("asks for a real device: (torch finds no CUDA|this build)", done.stderr)


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
