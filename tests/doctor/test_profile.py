"""`faststep.profile()`: phases, steps and lines of a block."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import faststep


class Slow(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(30):
            time.sleep(0.04)
            yield torch.ones(4)


class Model(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().forward(x)


def train() -> None:
    model = Model(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in DataLoader(Slow()):
        model(x).sum().backward()
        optimizer.step()


def test_phases_steps_and_lines() -> None:
    backward = torch.autograd.backward
    torch.optim.SGD([torch.ones(1)], lr=0.01).step()  # the first one imports torch's compiler
    with faststep.profile() as measured:
        assert measured.phases == {}
        train()
    assert torch.autograd.backward is backward
    assert [*measured.phases][:2] == ["data", "forward"]
    assert sum(measured.phases.values()) == pytest.approx(1.0)
    assert len(measured.steps) == 30
    assert min(measured.steps) >= 0.06
    first, second, *_ = measured.lines
    text = Path(__file__).read_text().splitlines()
    assert (first.file, first.phase) == (__file__, "data")
    assert text[first.number - 1].strip() == "time.sleep(0.04)"
    assert text[second.number - 1].strip() == "time.sleep(0.02)"
    assert 1.0 > first.share > second.share
    assert str(measured).startswith("30 steps: mean ")
    assert f"test_profile.py:{first.number}" in str(measured)


def test_an_exception_passes_through() -> None:
    with pytest.raises(ValueError, match="the reason"), faststep.profile() as found:
        fail_slowly()
    assert found.phases == {"everything else": pytest.approx(1.0)}
    assert found.steps == []
    assert "0 steps" in str(found)


def fail_slowly() -> None:
    time.sleep(0.2)
    raise ValueError("the reason")


def test_blocks_cannot_be_nested() -> None:
    with faststep.profile(), pytest.raises(RuntimeError, match="is measuring another block"):
        faststep.profile().__enter__()
    with faststep.profile():
        pass


def test_it_is_imported_when_it_is_used() -> None:
    assert "profile" in faststep.__all__
    with pytest.raises(AttributeError, match="module 'faststep' has no attribute 'profiles'"):
        faststep.profiles  # type: ignore[attr-defined]  # noqa: B018


def test_blocks_without_gradients_are_another_phase() -> None:
    """Variables of a thread that runs cannot be read safely; a module's text can."""
    model = Model(4, 1)
    with faststep.profile() as measured:
        for _ in range(20):
            with torch.no_grad():
                validated = model(torch.ones(4))
    assert validated.shape == (1,)
    assert next(iter(measured.phases)) == "evaluation"
    with faststep.profile() as measured:
        for _ in range(20):
            model.eval()(torch.ones(4))
    assert next(iter(measured.phases)) == "forward"
