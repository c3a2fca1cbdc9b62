"""Scripts with accelerate, Lightning and Trainer, and loops without them, under the doctor."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from faststep.doctor.findings import suspects
from faststep.doctor.runs import Length, Runs
from faststep.doctor.sandbox import is_available
from faststep.run.program import Program

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
LOOPS = {"accelerate": "for x, y in", "lightning": "trainer.fit(", "transformers": "trainer.train("}
SCRIPTS = {
    "accelerate": HERE / "diagnosed" / "with_accelerate.py",
    "lightning": HERE / "diagnosed" / "with_lightning.py",
    "transformers": HERE / "diagnosed" / "with_trainer.py",
}
SLOW = "0.004"  # seconds per sample

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not is_available(), reason="no sandbox on this system"
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def needs(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: make frameworks installs it")


def started(script: Path, *arguments: str) -> Runs:
    program = Program(str(script), list(arguments))
    return Runs(program, time.monotonic() + 120, network=False, sandbox="namespaces")


def assert_is_healthy(found: dict[str, Any], *phases: str) -> None:
    """Steps are seen, their time has these phases among others, and nothing is to blame."""
    assert len(found["steps"]) >= 25
    assert sum(found["phases"].values()) == pytest.approx(sum(found["steps"]), rel=0.1)
    assert {"forward", "backward", *phases} <= found["phases"].keys()
    assert [one for one in suspects(found) if one.is_error or not one.needs_trial] == []


@pytest.mark.parametrize("package", SCRIPTS)
def test_nothing_is_wrong_with_a_framework(package: str, tmp_path: Path) -> None:
    needs(package)
    found = started(SCRIPTS[package], "0").measure(Length(3.0, 25))
    assert_is_healthy(found, "data", "clipping", "optimizer")
    assert [one["module"] for one in found["optimizers"]] == ["torch.optim.adamw"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", SCRIPTS)
def test_a_framework_waits_for_samples(package: str) -> None:
    """The script's line is to blame, and workers get through to the framework's loader."""
    needs(package)
    script = SCRIPTS[package]
    runs = started(script, SLOW)
    first = suspects(runs.measure(Length(1.0, 10)))[0]
    assert first.cause == "starved-loader"
    file, _, line = (first.line or "").rpartition(":")
    assert file == str(script)
    assert script.read_text().splitlines()[int(line) - 1].strip().startswith(LOOPS[package])
    changed = runs.measure(Length(0.5, 5), {"loader": {"num_workers": 1}})
    assert max(use["workers"] for use in changed["loaders"] if use["batches"]) == 1


def test_a_whole_answer_with_accelerate(tmp_path: Path) -> None:
    needs("accelerate")
    script = SCRIPTS["accelerate"]
    options = ("--minutes", "1", "--json", "answer.json", str(script), SLOW)
    done = subprocess.run(
        [sys.executable, "-m", "faststep", "doctor", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["verdict"].startswith("starved-loader")
    assert answer["verdict"] in done.stdout
    assert [one["cause"] for one in answer["findings"]] == ["starved-loader"]
    assert answer["phases"]["data"] > 0.5
    assert {path.name for path in tmp_path.iterdir()} == {"answer.json"}


@pytest.mark.parametrize("name", ["train_digits", "train_gpt"])
def test_nothing_is_wrong_with_a_plain_loop(name: str) -> None:
    if name == "train_digits":
        pytest.importorskip("sklearn", reason="scikit-learn brings the digits")
    found = started(EXAMPLES / f"{name}.py").measure(Length(1.0, 25))
    assert_is_healthy(found)
    assert [one["module"] for one in found["optimizers"]] == ["faststep.optim.adam"]
