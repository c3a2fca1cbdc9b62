"""The examples run, learn what they claim, and keep what they say about checkpoints."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> dict[str, Any]:
    """The names that an example defines; its functions see changes to them."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"].__globals__


def test_train_gpt_learns_to_sort(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("train_gpt")
    example["STEPS"] = 150
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


def losses_of_ranks(ranks: int, name: str, *args: object) -> dict[int, float]:
    """What an example prints under torchrun: the loss by the number of the step."""
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    command = [*launch, str(ranks), str(EXAMPLES / f"{name}.py"), *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return {int(s): float(v) for s, v in re.findall(r"step +(\d+)  loss ([0-9.]+)", done.stdout)}


def test_sharded_training_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """After the checkpoint of a run on two ranks one rank goes on, with the losses of two."""
    kept = tmp_path / "kept.pt"
    options = ("--every", 4, "--checkpoint")
    straight = losses_of_ranks(2, "train_ddp", "--steps", 16, *options, tmp_path / "straight.pt")
    first = losses_of_ranks(2, "train_ddp", "--steps", 8, *options, kept)
    (tmp_path / "kept.unfinished").write_bytes(b"half of a checkpoint")
    then = losses_of_ranks(1, "train_ddp", "--steps", 16, *options, kept)
    assert list(straight) == [4, 8, 12, 16]
    assert list(first) == [4, 8]
    assert list(then) == [12, 16]
    assert {**first, **then} == pytest.approx(straight, rel=1e-4)
