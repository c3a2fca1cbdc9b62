"""KeyedSampler is a permutation for each seed and epoch, in no memory."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from faststep.data import DataLoader, KeyedSampler


class Huge(Dataset[int]):
    def __len__(self) -> int:
        return 1_000_000_000


@given(rows=st.integers(1, 3000), seed=st.integers(-5, 2**64), epoch=st.integers(0, 5))
def test_is_a_permutation(rows: int, seed: int, epoch: int) -> None:
    sampler = KeyedSampler(range(rows), seed=seed)
    sampler.set_epoch(epoch)
    assert sorted(sampler) == list(range(rows))


def test_seed_and_epoch_are_the_key() -> None:
    orders = {}
    for seed in range(3):
        sampler = KeyedSampler(range(1000), seed=seed)
        for epoch in range(3):
            orders[seed, epoch] = tuple(sampler)
            assert sampler.epoch == epoch + 1
    assert len(set(orders.values())) == 9
    again = KeyedSampler(range(1000), seed=1)
    again.set_epoch(2)
    assert tuple(again) == orders[1, 2]


def test_takes_no_random_numbers_and_minds_no_seed() -> None:
    before = torch.get_rng_state()
    first = list(KeyedSampler(range(100)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.default_generator.manual_seed(77)
    assert list(KeyedSampler(range(100))) == first


@given(rows=st.integers(1, 200), ranks=st.integers(1, 7), drop_last=st.booleans())
def test_ranks_share_the_samples(rows: int, ranks: int, drop_last: bool) -> None:
    shares = [
        list(KeyedSampler(range(rows), num_replicas=ranks, rank=rank, drop_last=drop_last))
        for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1
    together = [index for share in shares for index in share]
    if drop_last:
        assert len(set(together)) == len(together) == rows // ranks * ranks
    else:
        assert set(together) == set(range(rows))
        assert len(together) == -(-rows // ranks) * ranks


@pytest.mark.parametrize("order", ["sampler", "loader"])
def test_a_billion_samples_take_no_memory(order: str) -> None:
    sampler = KeyedSampler(Huge())
    data = torch.zeros(1, dtype=torch.uint8).expand(1_000_000_000)
    tracemalloc.start()
    if order == "sampler":
        iterator: Any = iter(sampler)
        seen = [next(iterator) for _ in range(5000)]
    else:
        loader = DataLoader(TensorDataset(data), 64, sampler=sampler)
        iterator = iter(loader)
        for _ in range(100):
            assert len(next(iterator)[0]) == 64
        assert loader.state_dict()["_sampler_iter_state"]["position"] == 6400
        seen = list(range(5000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert len(set(seen)) == 5000


def test_the_loader_takes_the_same_order() -> None:
    data = TensorDataset(torch.arange(40_000))
    got = [DataLoader(data, 7, sampler=KeyedSampler(data, seed=3)) for _ in range(2)]
    want = torch.utils.data.DataLoader(data, 7, sampler=KeyedSampler(data, seed=3))
    for _ in range(2):
        once = torch.cat([batch for (batch,) in got[0]])
        assert torch.equal(once, torch.cat([batch for (batch,) in want]))
    assert "known ahead" in got[1].explain()


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="both of num_replicas and rank"):
        KeyedSampler(range(3), rank=1)
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        KeyedSampler(range(3), num_replicas=2, rank=2)
    assert list(KeyedSampler(range(0))) == []


def test_pickle() -> None:
    sampler = KeyedSampler(range(9), seed=2)
    list(sampler)
    other = pickle.loads(pickle.dumps(sampler))
    assert list(other) == list(sampler)
