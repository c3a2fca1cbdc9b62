"""States of torchdata's StatefulDataLoader, loaded: the rest of the epoch is what it would give."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from faststep.data import DataLoader

theirs = pytest.importorskip("torchdata.stateful_dataloader")


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Counting(Rows):
    """A dataset with a state."""

    count = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        return torch.tensor([index, self.count])

    def state_dict(self) -> Any:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


class Reversed(Sampler[int]):
    """Keeps its place itself."""

    def __init__(self, own: bool) -> None:
        self.at, self.own = 0, own

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        while self.at < 50:
            self.at += 1
            yield 50 - self.at
        self.at = 0

    def __getattr__(self, name: str) -> Any:
        if name == "state_dict" and self.own:
            return lambda: {"at": self.at}
        if name == "load_state_dict" and self.own:
            return lambda state: setattr(self, "at", state["at"])
        raise AttributeError(name)


class Numbers(IterableDataset[Any]):
    """Its iterator keeps a state if asked to."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        part = range(50) if info is None else range(info.id, 50, info.num_workers)
        return Place(part) if self.keeps else iter([torch.tensor(i) for i in part])


class Place:
    def __init__(self, part: range) -> None:
        self.part, self.at = part, 0

    def __iter__(self) -> Place:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at >= len(self.part):
            raise StopIteration
        self.at += 1
        return torch.tensor(self.part[self.at - 1])

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


KINDS: dict[str, Any] = {
    "in order": lambda: {"dataset": Rows(), "batch_size": 4},
    "shuffled": lambda: {"dataset": Rows(), "batch_size": 4, "shuffle": True},
    "generator": lambda: {
        "dataset": Rows(),
        "batch_size": 4,
        "shuffle": True,
        "generator": generator(),
    },
    "drop_last": lambda: {"dataset": Rows(), "batch_size": 4, "shuffle": True, "drop_last": True},
    "samples": lambda: {"dataset": Rows(), "batch_size": None, "shuffle": True},
    "distributed": lambda: {
        "dataset": Rows(),
        "batch_size": 4,
        "sampler": DistributedSampler(Rows(), 2, 1, seed=3),
    },
    "own sampler": lambda: {"dataset": Rows(), "batch_size": 4, "sampler": Reversed(True)},
    "plain sampler": lambda: {"dataset": Rows(), "batch_size": 4, "sampler": [*range(49, -1, -1)]},
    "batches": lambda: {"dataset": Rows(), "batch_sampler": [[1, 2], [3], [4, 5, 6], [7]] * 3},
    "own dataset": lambda: {"dataset": Counting(), "batch_size": 4, "shuffle": True},
    "stream": lambda: {"dataset": Numbers(True), "batch_size": 4},
    "plain stream": lambda: {"dataset": Numbers(False), "batch_size": 4},
}


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def rests(kind: str, workers: int, place: int, **options: Any) -> tuple[Any, list[Any]]:
    """torchdata's state after some batches, and what it gives after that."""
    torch.manual_seed(5)
    loader = theirs.StatefulDataLoader(**KINDS[kind](), num_workers=workers, **options)
    iterator = iter(loader)
    for _ in range(place):
        next(iterator)
    state = copy.deepcopy(loader.state_dict())
    return state, lists(iterator)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 1, 5])
def test_the_rest_of_an_epoch(kind: str, workers: int, place: int) -> None:
    state, rest = rests(kind, workers, place)
    torch.manual_seed(99)
    loader = DataLoader(**KINDS[kind](), num_workers=workers)
    if kind == "plain stream" and workers:
        with pytest.raises(ValueError, match="keeps no state, and has to be read by the same work"):
            loader.load_state_dict(state)
        return
    loader.load_state_dict(state)
    iterator = iter(loader)
    assert lists([next(iterator) for _ in range(2)]) == rest[:2]
    ours = loader.state_dict()  # is ours from then on
    assert lists(iterator) == rest[2:]
    again = DataLoader(**KINDS[kind](), num_workers=workers)
    again.load_state_dict(ours)
    assert lists(again) == rest[2:]
    assert len(lists(again)) == place + len(rest)


@pytest.mark.parametrize("kind", ["in order", "shuffled", "generator", "own sampler"])
@pytest.mark.parametrize("every", [0, 4])
def test_states_of_a_while_ago(kind: str, every: int) -> None:
    state, rest = rests(kind, 2, 6, snapshot_every_n_steps=every)
    for workers in (0, 1):
        loader = DataLoader(**KINDS[kind](), num_workers=workers)
        loader.load_state_dict(state)
        assert lists(loader) == rest
    state, _ = rests("own dataset", 2, 6, snapshot_every_n_steps=4)
    loader = DataLoader(**KINDS["own dataset"](), num_workers=2)
    with pytest.raises(ValueError, match=r"2 batches after its dataset's own.*StatefulDataLoader"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["in order", "generator", "own sampler", "stream"])
def test_the_next_epoch(kind: str, workers: int) -> None:
    torch.manual_seed(5)
    loader = theirs.StatefulDataLoader(**KINDS[kind](), num_workers=workers)
    first = lists(loader)
    state = copy.deepcopy(loader.state_dict())
    want = lists(loader)
    torch.manual_seed(99)
    ours = DataLoader(**KINDS[kind](), num_workers=workers)
    ours.load_state_dict(state)
    got = lists(ours)
    if kind == "generator" and workers:  # torchdata's then draws twice as often
        assert sorted(number for batch in got for number in batch) == [*range(50)]
        assert got != first
    else:
        assert got == want
        assert (want == first) == (kind != "generator")


def test_draws_that_come_as_they_are_needed() -> None:
    def options() -> dict[str, Any]:
        return {"num_samples": 90, "replacement": True, "generator": generator()}

    sampler = theirs.sampler.RandomSampler(Rows(), **options())
    loader = theirs.StatefulDataLoader(Rows(), 4, sampler=sampler)
    iterator = iter(loader)
    for _ in range(11):
        next(iterator)
    ours = DataLoader(Rows(), 4, sampler=RandomSampler(Rows(), **options()))
    ours.load_state_dict(loader.state_dict())
    assert lists(ours) == lists(iterator)


def damaged() -> Iterator[tuple[str, Any, int]]:
    for workers in (0, 2):
        for kind in ("shuffled", "stream"):
            whole, _ = rests(kind, workers, 3)
            for path in paths(whole):
                for value in ("x", -1, None, [], {}):
                    state = copy.deepcopy(whole)
                    part = state
                    for key in path[:-1]:
                        part = part[key]
                    part[path[-1]] = value
                    yield kind, state, workers
                    del part[path[-1]]
                    yield kind, state, workers


def paths(state: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield (key,)
            yield from ((key, *rest) for rest in paths(value))


def test_damaged_states_change_nothing() -> None:
    for kind, state, workers in damaged():
        loader = DataLoader(**KINDS[kind](), num_workers=workers)
        try:
            loader.load_state_dict(state)
        except ValueError:
            assert loader._faststep.resume is None
