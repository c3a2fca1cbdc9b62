"""The scripts of whole/, on tiny sizes: all run, and learn the same in every mode."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import faststep.cli.scripts

WHOLE = Path(__file__).parent / "whole"
# Of losses between 0.1 and 600, after six steps; what differs is the rounding of fused kernels.
MOST = 2e-5


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """One process for all of them."""
    results = tmp_path_factory.mktemp("whole") / "smoke.json"
    command = [sys.executable, str(WHOLE / "compare.py"), "--smoke", "--json", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(results.read_text())["works"]
    return found


def test_every_script_learns_the_same_in_every_mode(works: list) -> None:
    demo = Path(faststep.cli.scripts.__file__).parent
    found = {path.name for folder in (WHOLE / "scripts", demo) for path in folder.glob("*.py")}
    assert len(works) == len(found - {"gpt.py", "meter.py", "__init__.py"}) == 10
    for work in works:
        assert set(work["modes"]) == {"plain", "fused", "swapped", "max_grad_norm"}
        for mode, found in work["modes"].items():
            first = max(1.0, abs(found["losses"][0]))
            assert found["loss_difference"] <= MOST * first, f"{work['work']}, {mode}"
        losses = work["modes"]["plain"]["losses"]
        assert losses[0] != losses[1], f"{work['work']} learns nothing"


def test_clipping_inside_leaves_no_clipping_outside(works: list) -> None:
    for work in works:
        clips = {mode: found["phases"]["clip"] for mode, found in work["modes"].items()}
        assert clips["max_grad_norm"] < 0.5 * clips["plain"], work["work"]


def test_scripts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WHOLE))
    turns = importlib.import_module("turns")
    script = [sys.executable, str(Path(faststep.cli.scripts.__file__).parent / "tabular.py")]
    sizes = ["--tiny", "--warm-up", "1", "--steps", "6"]
    found = turns.play({name: ([*script, *sizes], os.environ) for name in "ab"}, 2, 3)
    assert found["a"]["losses"] == found["b"]["losses"]
    for run in found.values():
        assert sum(run["turns"]) == pytest.approx(sum(map(sum, run["phases"].values())))
    with pytest.raises(turns.CommandError, match="unrecognized arguments: --no"):
        turns.play({"a": ([*script, "--no"], os.environ)}, 2, 3)


def test_the_interval_of_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WHOLE))
    turns = importlib.import_module("turns")
    torch.manual_seed(0)
    hits = 0
    for count in (3, 5, 12, 20) * 250:
        mean, low, high = turns.interval(torch.randn(count).mul(0.1).exp().tolist())
        assert low <= mean <= high
        hits += low <= 1.0 <= high
    assert 920 <= hits <= 980  # of 1000; 95 % of them
    assert turns.ratios([[2.0, 3.0, 8.0]], [[1.0, 1.0, 1.0]]) == [3.0]


def test_figures_that_pages_must_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WHOLE))
    written, works = (importlib.import_module(name) for name in ("written", "works"))
    good = {"others": 1.0, "rounds": 3, "works": [{"work": name} for name in works.WORKS]}
    assert not written.unfit(good)
    for wrong, reason in (
        ({"others": 7.0}, "busy with something else: 7 %"),
        ({"others": float("nan")}, "Nothing is known"),
        ({"rounds": 1}, "fewer than 3 rounds"),
        ({"works": good["works"][1:]}, "not measured: CNN"),
    ):
        assert reason in written.unfit({**good, **wrong})
