"""The examples run, learn what they claim, and keep what they say about checkpoints."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import Job, results_of

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


PRINTED = re.compile(r"step +(\d+)  loss ([0-9.]+)")
DDP = ("--steps", "16", "--every", "4", "--rows", "640", "--checkpoint")  # 10 steps per epoch


def losses_of_ranks(
    ranks: int, name: str, *args: object, killed_by: Path | None = None
) -> dict[int, float]:
    """What an example prints under torchrun: the loss by the number of the step.

    `killed_by` is a script that runs the example, and does not return.
    """
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    script = killed_by or EXAMPLES / f"{name}.py"
    command = [*launch, str(ranks), str(script), *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert (done.returncode == 0) is (killed_by is None), done.stderr
    return {int(step): float(loss) for step, loss in PRINTED.findall(done.stdout)}


def undisturbed(rank: int, world: int, path: Path) -> dict[int, float]:
    """What it prints on a rank that is there already."""
    sys.path.insert(0, str(EXAMPLES))
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(sys, "argv", ["train_ddp.py", *DDP, str(path)])
        patch.setattr(dist, "init_process_group", lambda _: None)
        patch.setattr(dist, "destroy_process_group", lambda *_: None)
        load("train_ddp")["main"]()
    return {int(step): float(loss) for step, loss in PRINTED.findall(said.getvalue())}


KILLED = """
import os, runpy, signal, sys
saves = []
def fsync(file):
    saves.append(file)
    if len(saves) == 2:  # in the middle of the second checkpoint
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = fsync
sys.path.insert(0, {folder!r})
runpy.run_path({folder!r} + "/train_ddp.py", run_name="__main__")
"""


def test_sharded_training_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """A rank of two is killed while it saves; one rank goes on, with the rows and losses of two."""
    job = Job("undisturbed", 2, undisturbed, (tmp_path / "straight.pt",))
    straight, quiet = results_of([job])[job.name]
    kept = tmp_path / "kept.pt"
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(folder=str(EXAMPLES)))
    first = losses_of_ranks(2, "train_ddp", *DDP, kept, killed_by=script)
    assert (tmp_path / "kept.unfinished").exists()
    then = losses_of_ranks(1, "train_ddp", *DDP, kept)
    assert list(straight) == [4, 8, 12, 16]
    assert quiet == {}
    assert list(first) == [4, 8]  # it is printed before it is saved
    assert list(then) == [8, 12, 16]
    assert first == pytest.approx({step: straight[step] for step in first}, rel=1e-4)
    assert then == pytest.approx({step: straight[step] for step in then}, rel=1e-4)
