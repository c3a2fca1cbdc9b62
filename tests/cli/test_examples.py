"""The examples run, learn what they claim, and keep what they say about checkpoints."""

from __future__ import annotations

import runpy
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
