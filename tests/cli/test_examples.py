"""The examples run, learn what they claim, and keep what they say about checkpoints."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from programs import SCRIPT, Programs

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> dict[str, Any]:
    """The names that an example defines; its functions see changes to them."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"].__globals__


def test_train_gpt_learns_to_sort(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("train_gpt")
    example["STEPS"] = 150
    torch.set_num_threads(1)  # threads that wait for a core make it ten times slower
    assert example["main"]() > 0.2
    assert "gradient norm before clipping" in capsys.readouterr().out


def test_train_digits_learns_digits() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn brings the digits")
    example = load("train_digits")
    example["EPOCHS"] = 3
    assert example["main"]() > 0.9


def test_training_continues_from_torch_and_back() -> None:
    straight, mixed = load("continue_from_torch")["main"]()
    assert mixed == pytest.approx(straight, rel=1e-3)


def test_accumulation_gives_the_curve_of_the_large_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the mistakes do not."""
    example = load("accumulate_gpt")
    example["STEPS"] = 3
    curves = example["main"]()
    exact = curves.pop("one large batch")
    assert "largest distance" in capsys.readouterr().out
    for name in ("before: torch", "after: faststep"):
        assert curves.pop(name) == pytest.approx(exact, abs=2e-6)
    assert len(curves) == 3
    for name, curve in curves.items():
        assert max(abs(a - b) for a, b in zip(curve, exact, strict=True)) > 1e-3, name


KILLED = """
import os, signal
saves = []
def fsync(file):
    saves.append(file)
    if len(saves) == 2:  # in the middle of the second checkpoint
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = fsync
"""
PRINTED = re.compile(r"step +(\d+)  loss ([0-9.]+)")
DDP = ("--steps", "16", "--every", "4", "--rows", "640", "--checkpoint")  # 10 steps per epoch


def test_sharded_training_goes_on_with_fewer_ranks(tmp_path: Path, programs: Programs) -> None:
    """A rank of two is killed while it saves; one rank goes on, with the rows and losses of two.

    Only the first one prints.
    """
    runs = []
    for ranks, before, file in ((2, "", "straight"), (2, KILLED, "kept"), (1, "", "kept")):
        words = (str(EXAMPLES / "train_ddp.py"), *DDP, str(tmp_path / f"{file}.pt"))
        done = programs.ranks(ranks, before + SCRIPT, *words)
        assert (done.returncode != 0) is bool(before), done.stderr
        assert (tmp_path / "kept.unfinished").exists() is bool(before)
        runs.append(PRINTED.findall(done.stdout))
    straight, first, then = ([(int(step), float(loss)) for step, loss in run] for run in runs)
    assert [step for step, _ in straight] == [4, 8, 12, 16]
    assert [step for step, _ in first] == [4, 8]  # it is printed before it is saved
    assert [step for step, _ in then] == [8, 12, 16]
    assert dict(first) == pytest.approx(dict(straight[:2]), rel=1e-4)
    assert dict(then) == pytest.approx(dict(straight[1:]), rel=1e-4)
