"""What a loader says of itself without a plan of its arrays, and without a copy of indices."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from faststep.data import DataLoader
from faststep.data.arrays import gather_plan

DATA = TensorDataset(torch.arange(40), torch.arange(40.0))
ORDER = list(range(39, -1, -1))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every list of indices that was copied."""
    seen: list[int] = []
    copy = gather_plan._as_int64

    def counted(indices: Any, name: str) -> torch.Tensor:
        seen.append(len(indices))
        return copy(indices, name)

    monkeypatch.setattr(gather_plan, "_as_int64", counted)
    return seen


def test_properties_copy_no_indices(copies: list[int]) -> None:
    nested = Subset(ConcatDataset([Subset(DATA, ORDER), Subset(DATA, ORDER)]), list(range(80)))
    loader = DataLoader(nested, 8)
    for _ in range(3):
        assert loader.path == "arrays"
        assert loader.explain().startswith("threads gather the batches from tensors[0]")
        loader.load_state_dict(loader.state_dict())
    assert copies == []
    assert len(list(loader)) == 10
    assert sorted(copies) == [40, 40, 80]  # once for the epoch
    next(iter(loader))
    assert len(copies) == 6


@pytest.mark.parametrize(
    "indices",
    [
        [*ORDER[:-1], 0.5],
        [*ORDER[:-1], torch.tensor(3)],
        [*ORDER[:-1], True],
        [*ORDER[:-1], 1 << 70],
        [None],
        [*range(gather_plan.PIECE), None],
        [*range(gather_plan.PIECE), 3],
        (*range(gather_plan.PIECE), 3.0),
        "12",
        torch.tensor(ORDER, dtype=torch.int32),
        torch.tensor([ORDER]),
        numpy.array(ORDER, dtype=numpy.uint8),
        numpy.array([ORDER]),
        range(3),
        (3, 2, 1),
        tuple(ORDER),
        [-1, -2],
        [],
        torch.tensor(ORDER),
        numpy.array(ORDER, dtype=numpy.int16),
        numpy.array(ORDER),
    ],
    ids=lambda indices: repr(indices)[-30:],
)
def test_a_path_is_that_of_the_epoch(indices: Any) -> None:
    """What is asked of indices without a copy decides as the copy does."""
    subset = Subset(DATA, indices)
    loader = DataLoader(subset, 4)
    reason = None
    try:
        gather_plan.Plan(subset)
    except gather_plan.NotArrays as why:
        reason = str(why)
    assert loader.path == ("arrays" if reason is None else "torch")
    assert (reason or "threads gather") in loader.explain()
