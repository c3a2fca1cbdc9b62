"""An epoch that is taken up again gives the rest of its batches, and the epochs after it."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

from faststep.data import DataLoader, KeyedSampler

from .torch_and_ours import plain

ROWS, BATCH, EPOCHS = 46, 5, 3


def dataset(rows: int = ROWS) -> TensorDataset:
    return TensorDataset(torch.arange(rows), torch.randn(rows, 2, generator=torch.Generator()))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(9)


ORDERS: dict[str, Any] = {
    "sequential": lambda d: {},
    "random": lambda d: {"shuffle": True},
    "generator": lambda d: {"shuffle": True, "generator": generator()},
    "own generator": lambda d: {"sampler": RandomSampler(d, generator=generator())},
    "few": lambda d: {"sampler": RandomSampler(d, num_samples=31, generator=generator())},
    "replacement": lambda d: {"sampler": RandomSampler(d, replacement=True, num_samples=60)},
    "distributed": lambda d: {"sampler": DistributedSampler(d, 3, 1, seed=3)},
    "short": lambda d: {"sampler": DistributedSampler(range(45), 2, 1, drop_last=True)},
    "keyed": lambda d: {"sampler": KeyedSampler(d, seed=4)},
    "keyed, shared": lambda d: {"sampler": KeyedSampler(d, num_replicas=3, rank=2)},
}


def make(order: str, **options: Any) -> DataLoader[Any]:
    data = dataset()
    return DataLoader(data, BATCH, **ORDERS[order](data), **options)


def saved(state: Any) -> Any:
    """As a checkpoint keeps it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def step(loader: DataLoader[Any], epoch: int) -> None:
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)


def whole(order: str, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """All epochs without interruption, and (epoch, state, random state) before each batch."""
    torch.default_generator.manual_seed(1)
    loader = make(order, **options)
    batches: list[Any] = []
    states: list[Any] = []
    for epoch in range(EPOCHS):
        step(loader, epoch)
        for batch in loader:
            batches.append(plain(batch))
            states.append((epoch, saved(loader.state_dict()), torch.get_rng_state()))
    return batches, states


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2, -2])
def test_every_place(order: str, drop_last: bool, workers: int) -> None:
    options = {"drop_last": drop_last, "num_workers": abs(workers)}
    options["persistent_workers"] = workers < 0
    batches, states = whole(order, options)
    assert len(batches) > 2 * EPOCHS
    for place, (first, state, random_state) in enumerate(states):
        loader = make(order, **options)
        torch.set_rng_state(random_state)
        loader.load_state_dict(state)
        assert plain(loader.state_dict()) == plain(state)
        got = []
        for epoch in range(first, EPOCHS):
            step(loader, epoch)
            got += plain(list(loader))[1]
        assert got == batches[place + 1 :], place


@pytest.mark.parametrize("order", ORDERS)
def test_a_resumed_epoch_can_be_interrupted_again(order: str) -> None:
    batches, states = whole(order, {})
    loader = make(order)
    loader.load_state_dict(states[1][1])
    iterator = iter(loader)
    assert plain(next(iterator)) == batches[2]
    state = saved(loader.state_dict())
    assert state["_num_yielded"] == 3
    del iterator
    again = make(order)
    again.load_state_dict(state)
    assert plain(next(iter(again))) == batches[3]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("when", ["before", "between", "after iter"])
@pytest.mark.parametrize("persistent", [False, True])
def test_at_the_border_of_epochs(order: str, when: str, persistent: bool) -> None:
    torch.default_generator.manual_seed(5)
    options = {"num_workers": int(persistent), "persistent_workers": persistent}
    loader = make(order, **options)
    if when == "between":
        list(loader)
    iterator = iter(loader) if when == "after iter" else None
    state = saved(loader.state_dict())
    random_state = torch.get_rng_state()
    want = plain(list(iterator or loader))
    random_state_after = torch.get_rng_state()
    torch.set_rng_state(random_state)
    other = make(order, **options)
    other.load_state_dict(state)
    assert plain(other.state_dict()) == plain(state)
    assert plain(list(other)) == want
    assert torch.equal(torch.get_rng_state(), random_state_after)


def test_what_was_delivered_counts() -> None:
    loader = make("sequential", num_workers=2, prefetch_factor=3)
    iterator = iter(loader)
    assert loader.state_dict()["_num_yielded"] == 0
    next(iterator)
    assert loader.state_dict()["_num_yielded"] == 1
    del iterator
    assert loader.state_dict()["_sampler_iter_yielded"] == 1


def test_no_random_number_is_drawn_for_the_loader_itself() -> None:
    loader = make("random")
    iterator = iter(loader)
    next(iterator)
    other = make("random")
    other.load_state_dict(loader.state_dict())
    before = torch.get_rng_state()
    next(iter(other))
    assert torch.equal(torch.get_rng_state(), before)


def test_another_batch_size() -> None:
    loader = make("random")
    iterator = iter(loader)
    had = [next(iterator)[0] for _ in range(3)]
    other = DataLoader(dataset(), 8, shuffle=True)
    other.load_state_dict(loader.state_dict())
    rest = [batch for batch, _ in other]
    assert len(rest[0]) == 8
    assert sorted(torch.cat(had + rest).tolist()) == list(range(ROWS))


def on_all_ranks(
    ranks: int, shared: Any, rows: int, state: Any, batches: int | None = None
) -> tuple[list[int], Any]:
    """What all ranks deliver, and the state of the last one after so many batches of each."""
    seen: list[int] = []
    data = TensorDataset(torch.arange(rows))
    for rank in range(ranks):
        loader = DataLoader(data, 4, sampler=shared(data, num_replicas=ranks, rank=rank))
        if state is not None:
            loader.load_state_dict(state)
        for (batch,) in itertools.islice(loader, batches):
            seen += batch.tolist()
    return seen, saved(loader.state_dict())


@pytest.mark.parametrize("ranks", [(1, 3, 2), (3, 1, 5), (2, 4, 1), (4, 2, 3)])
@pytest.mark.parametrize("shared", [KeyedSampler, DistributedSampler])
def test_another_number_of_ranks(shared: Any, ranks: tuple[int, int, int]) -> None:
    """All ranks together go on where all ranks together were."""
    first, state = on_all_ranks(ranks[0], shared, 121, None, batches=3)
    assert len(set(first)) == 12 * ranks[0]
    second, state = on_all_ranks(ranks[1], shared, 121, state, batches=2)
    assert len(set(first + second)) == 12 * ranks[0] + 8 * ranks[1]
    rest, _ = on_all_ranks(ranks[2], shared, 121, state)
    assert set(first + second + rest) == set(range(121))
    more = len(first + second + rest) - 121  # so that all have the same number
    assert more == -(121 - len(first + second)) % ranks[2]


def test_states_are_small() -> None:
    for order in ("sequential", "random", "distributed", "keyed"):
        loader = make(order)
        iterator = iter(loader)
        next(iterator)
        assert len(repr(loader.state_dict())) < 600


@pytest.mark.parametrize("key", ["_snapshot", "fetcher_state"])
@pytest.mark.parametrize("rest", ["", "whole"])
def test_a_state_of_torchdata_is_named(key: str, rest: str) -> None:
    loader = make("random")
    state = {**(loader.state_dict() if rest else {}), key: {}, "_iterator_finished": False}
    with pytest.raises(ValueError, match=f"'{key}', is of torchdata's StatefulDataLoader"):
        loader.load_state_dict(state)
    assert loader._faststep.resume is None


def test_a_state_of_another_loader_is_refused() -> None:
    random = make("random")
    next(iter(random))
    state = random.state_dict()
    for other, message in (
        (make("sequential"), "is of a RandomSampler, the loader has a SequentialSampler"),
        (DataLoader(dataset(40), shuffle=True), "46, and the loader's is 40"),
        (DataLoader(dataset(), sampler=RandomSampler(dataset(), num_samples=3)), "num_samples"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
    for wrong in ({}, {"_num_yielded": 3}, None):
        with pytest.raises(ValueError, match="not a state of this DataLoader"):
            random.load_state_dict(wrong)  # type: ignore[arg-type]
    keyed = make("keyed")
    next(iter(keyed))
    with pytest.raises(ValueError, match="seed 4, and the loader's is 5"):
        DataLoader(dataset(), sampler=KeyedSampler(dataset(), seed=5)).load_state_dict(
            keyed.state_dict()
        )


@pytest.mark.parametrize("order", ["distributed", "keyed"])
def test_another_epoch_than_the_states_is_an_error(order: str) -> None:
    loader = make(order)
    loader.sampler.set_epoch(2)
    next(iter(loader))
    other = make(order)
    other.load_state_dict(loader.state_dict())
    assert other.sampler.epoch == 2
    other.sampler.set_epoch(3)
    with pytest.raises(ValueError, match="in the middle of epoch 2, but the sampler was set to"):
        next(iter(other))


def test_a_state_fits_another_path() -> None:
    """What was saved on arrays goes on where the dataset cannot be gathered any more."""
    loader = make("random")
    iterator = iter(loader)
    next(iterator)
    other = make("random", collate_fn=list)
    other.load_state_dict(saved(loader.state_dict()))
    assert (loader.path, other.path) == ("arrays", "torch")
    rest = [[row[0].item() for row in batch] for batch in other]
    assert rest == [batch[0].tolist() for batch in iterator]


class Unready(SequentialSampler):
    ready = False

    def __iter__(self) -> Iterator[int]:
        if not self.ready:
            raise OSError("not yet")
        return super().__iter__()


def test_a_loaded_state_is_not_lost_if_no_iterator_can_be_made() -> None:
    data = dataset()
    loader = DataLoader(data, batch_size=None, sampler=Unready(data))
    loader.sampler.ready = True
    next(iter(loader))
    state = loader.state_dict()
    loader.sampler.ready = False
    loader.load_state_dict(state)
    with pytest.raises(OSError, match="not yet"):
        iter(loader)
    loader.sampler.ready = True
    assert next(iter(loader))[0].item() == 1


def test_subsets_and_persistent_workers() -> None:
    data = Subset(dataset(), range(1, ROWS))
    options = {"num_workers": 1, "persistent_workers": True, "shuffle": True}
    loader = DataLoader(data, BATCH, **options)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    want = plain(list(iterator))
    other = DataLoader(data, BATCH, **options)
    other.load_state_dict(state)
    assert plain(list(other)) == want
    assert len(list(other)) == 9
    other.load_state_dict(state)
    assert plain(list(other)) == want
    assert BatchSampler is type(other.batch_sampler)
