"""DDP and FSDP2 of accelerate and Lightning, on two ranks that torchrun starts."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .loops import TOLERANCE
from .page import blocks

for name in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(name, reason=f"{name} is not installed: make frameworks installs it")

LIGHTNING = ("", ", its clipping", ", saved")
ACCELERATE = (*LIGHTNING, ", after")
OF_ACCELERATE = [
    "accelerate, swapped",
    "accelerate, max_grad_norm",
    *(f"accelerate, stage {stage}{how}" for stage in (1, 2) for how in ACCELERATE),
    *(f"accelerate FSDP2, {how}" for how in ("torch", "swapped", "max_grad_norm")),
]
OF_LIGHTNING = [
    "Lightning, swapped",
    "Lightning, max_grad_norm",
    *(f"Lightning, stage {stage}{how}" for stage in (1, 2) for how in LIGHTNING),
    *(f"Lightning FSDP2, {how}" for how in ("torch", "swapped", "max_grad_norm")),
]

OF_TRAINER = [f"Trainer, stage {stage}{how}" for stage in (1, 2) for how in ("", ", resumed")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("ranks") / "found"
    script = Path(__file__).parent / "on_ranks.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(script), str(path)], env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=path.parent, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return pickle.loads(path.read_bytes())


@pytest.mark.parametrize("case", OF_ACCELERATE + OF_LIGHTNING + OF_TRAINER)
def test_losses_are_those_of_torch_under_ddp(found: dict[str, Any], case: str) -> None:
    assert isinstance(found[case], float), found[case]
    assert found[case] <= TOLERANCE


def test_a_model_that_is_wrapped_too_late(found: dict[str, Any]) -> None:
    text = "DistributedDataParallel goes around the model before shard()"
    assert text in found["accelerate, before"]


@pytest.mark.parametrize("number", [n for n, code in enumerate(blocks()) if "zero.shard" in code])
def test_the_page(found: dict[str, Any], number: int) -> None:
    assert found[f"page {number}"] == "done"
