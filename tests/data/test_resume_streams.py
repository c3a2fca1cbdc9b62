"""Samplers and streams that are hard to take up again: draws in two steps, epochs that are left."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, Sampler

from faststep.data import DataLoader

from .resumable import KeepsState, goes_on
from .torch_and_ours import outcomes, without_texts


def lists(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


class TwoDraws(Sampler[int]):
    """Draws in `__iter__`, and again for its first index."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return self.shuffled(torch.randperm(20).tolist())

    def shuffled(self, order: list[int]) -> Iterator[int]:
        for i in torch.randperm(20).tolist():
            yield order[i]


def test_a_sampler_that_draws_twice() -> None:
    goes_on(lambda: DataLoader(range(20), 4, sampler=TwoDraws()), 2)


class OwnDraws(KeepsState, Sampler[int]):
    """Keeps its place, but not its generator."""

    kept = ("place",)

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.place = generator, 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(8, generator=self.generator).tolist()
        start, self.place = self.place, 0
        for place in range(start, 8):
            self.place = place + 1
            yield order[place]
        self.place = 0


def test_the_next_epoch_of_a_sampler_with_a_generator() -> None:
    loader = DataLoader(range(8), 4, sampler=OwnDraws(torch.Generator().manual_seed(1)))
    list(loader)
    state = loader.state_dict()
    following = lists(loader)
    other = DataLoader(range(8), 4, sampler=OwnDraws(torch.Generator()))
    other.load_state_dict(state)
    assert lists(other) == following


class Endless(KeepsState, IterableDataset[int]):
    kept = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.number += 1
            yield self.number


def test_an_endless_epoch_that_was_left_is_not_read_to_its_end() -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "timeout": 60}
    loader = DataLoader(Endless(), 2, **options)
    for _, _ in zip(range(3), loader, strict=False):
        pass
    for _ in loader:
        state = loader.state_dict()
        break
    other = DataLoader(Endless(), 2, **options)
    other.load_state_dict(state)
    assert len(next(iter(other))) == 2


class Counting(KeepsState, IterableDataset[int]):
    """Another epoch, other numbers."""

    kept = ("place", "epoch")

    def __init__(self) -> None:
        self.place = self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 6:
            self.place += 1
            yield 1000 * self.epoch + self.place
        self.place, self.epoch = 0, self.epoch + 1


@pytest.mark.parametrize("batches", [0, 1])
def test_states_that_are_taken_rarely_know_the_epoch(batches: int) -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    loader = DataLoader(Counting(), 2, snapshot_every_n_steps=5, **options)
    list(loader)
    if batches:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        rest = lists(iterator)
    else:
        state = loader.state_dict()
        rest = lists(loader)
    other = DataLoader(Counting(), 2, snapshot_every_n_steps=5, **options)
    other.load_state_dict(state)
    assert lists(other) == rest
    assert rest[-1] == [1005, 1006]


class Failing(IterableDataset[int]):
    """Some samples cannot be read; a generator is over after the first of them, an object not."""

    def __init__(self, endures: bool = True) -> None:
        self.endures = endures
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        return iter(self.next_number, None) if self.endures else self.numbers()

    def next_number(self) -> int | None:
        number, self.number = self.number, self.number + 1
        if number in (7, 12, 13):
            raise KeyError(number)
        return number if number < 20 else None

    def numbers(self) -> Iterator[int]:
        yield from iter(self.next_number, None)


class FailingWithState(KeepsState, Failing):
    kept = ("number",)


def outcomes_of(loader: DataLoader[Any], states: list[Any]) -> list[Any]:
    """Batches and what was raised instead of some, and the state after each."""
    got = outcomes(loader, lambda: states.append(loader.state_dict()), stop=40)
    assert len(got) < 40
    return without_texts(got)


PATHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead on a device": {"device": "cpu", "prefetch_to_device": 2},
    "processes": {"num_workers": 2},
    "a thread": {"num_workers": 1, "worker_method": "thread"},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("kind", "endures", "every"),
    [
        (Failing, True, None),
        (Failing, False, None),
        (FailingWithState, True, 3),
        (FailingWithState, True, 0),
    ],
)
def test_a_stream_with_samples_that_cannot_be_read(
    path: str, kind: type[Failing], endures: bool, every: int | None
) -> None:
    options = PATHS[path] | {"snapshot_every_n_steps": every}

    def new() -> DataLoader[Any]:
        return DataLoader(kind(endures), 3, **options)

    states: list[Any] = []
    want = outcomes_of(new(), states)
    assert KeyError in want
    assert (want.count(KeyError) > 2) == endures
    for place, state in enumerate(states):
        other, again = new(), list[Any]()
        other.load_state_dict(state)
        assert outcomes_of(other, again) == want[place + 1 :]
        if again:  # once more, from an epoch that was itself taken up
            other = new()
            other.load_state_dict(again[0])
            assert outcomes_of(other, []) == want[place + 2 :]


def samples_of(got: list[Any]) -> list[int]:
    return [sample for batch in got if batch is not KeyError for sample in batch[1]]


def test_another_batch_size_after_a_sample_that_cannot_be_read() -> None:
    states: list[Any] = []
    outcomes_of(DataLoader(Failing(), 3), states)
    loader, again = DataLoader(Failing(), 4, collate_fn=list), list[Any]()
    loader.load_state_dict(states[2])  # [0, 1, 2], [3, 4, 5], and 6 is lost with 7
    rest = outcomes_of(loader, again)
    want = [[8, 9, 10, 11], KeyError, KeyError, [14, 15, 16, 17], [18, 19]]
    assert rest == [one if one is KeyError else (list, one) for one in want]
    for place, state in enumerate(again):
        loader = DataLoader(Failing(), 2, collate_fn=list)
        loader.load_state_dict(state)
        assert samples_of(outcomes_of(loader, [])) == samples_of(rest[place + 1 :])


def test_a_new_error_while_samples_are_read_again_is_raised() -> None:
    states: list[Any] = []
    outcomes_of(DataLoader(Failing(), 3), states)
    dataset = Failing()
    loader = DataLoader(dataset, 3)
    loader.load_state_dict(states[5])
    dataset.next_number = lambda: 1 // 0  # type: ignore[method-assign,return-value]
    with pytest.raises(ZeroDivisionError):
        next(iter(loader))
