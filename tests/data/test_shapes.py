"""Every kind of batch comes as torch's does, with stats() and a place to go on from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from faststep.data import DataLoader
from faststep.data.stats import ALL_OF, ONE_IN

from .shapes import SHAPES, Mapped, tensor

COUNT, BATCH, SEED = 14, 4, 7


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, np.ndarray):
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        assert_same(list(ours.values()), list(theirs.values()))
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_it_comes_as_torchs_does(name: str, workers: int) -> None:
    kind, make, own = SHAPES[name]
    options = {"batch_size": BATCH, "num_workers": workers, **own}
    torch.manual_seed(SEED)
    expected = list(torch.utils.data.DataLoader(kind(make, COUNT), **options))
    after = torch.get_rng_state()

    torch.manual_seed(SEED)
    loader = DataLoader(kind(make, COUNT), **options)
    iterator = iter(loader)
    begun = [next(iterator), next(iterator)]
    state = loader.state_dict()
    assert_same([*begun, *iterator], expected)
    assert torch.equal(torch.get_rng_state(), after)
    stats = loader.stats()
    assert stats is not None
    assert stats["batches"] == len(expected)
    assert stats["wait"]["total"] > 0

    resumed = DataLoader(kind(make, COUNT), **options)
    resumed.load_state_dict(state)
    assert_same(list(resumed), expected[2:])


def test_few_batches_are_looked_through() -> None:
    batches, looks = 4 * ONE_IN, 0
    loader: DataLoader[Any] = DataLoader(Mapped(tensor, batches), 1)
    iterator: Any = iter(loader)

    def count(batch: torch.Tensor) -> int:
        nonlocal looks
        looks += 1
        return batch.nbytes

    iterator.bytes_of = count
    size = sum(batch.nbytes for batch in iterator)
    stats = loader.stats()
    assert stats is not None
    assert (stats["bytes"], looks) == (size, ALL_OF + 4)
