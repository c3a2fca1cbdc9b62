"""Every kind of batch comes as torch's does, with stats() and a place to go on from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from faststep.data import DataLoader
from faststep.data.stats import ALL_OF, ONE_IN

from .shapes import SHAPES, Mapped, tensor
from .torch_and_ours import plain

COUNT, BATCH, SEED = 14, 4, 7


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
    assert plain([*begun, *iterator]) == plain(expected)
    assert torch.equal(torch.get_rng_state(), after)
    stats = loader.stats()
    assert stats is not None
    assert stats["batches"] == len(expected)
    assert stats["wait"]["total"] > 0

    resumed = DataLoader(kind(make, COUNT), **options)
    resumed.load_state_dict(state)
    assert plain([*resumed]) == plain(expected[2:])


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
