"""A dataset's set_epoch reaches its copies in persistent workers before the next epoch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from faststep.data import DataLoader

WORKERS, ROWS = 2, 8


class Base:
    calls = 0

    def set_epoch(self, epoch: int, scale: int = 1) -> None:
        self._when = epoch * scale  # under a name that nobody knows
        self.calls += 1


class Map(Base, Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[int, int]:
        return getattr(self, "_when", -1), self.calls


class Fetched(Map):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(Base, IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[int, int]]:
        when = getattr(self, "_when", -1)
        return iter([(when, self.calls)] * ROWS)


class Stateful(Stream):
    at = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        when = self.epoch
        while self.at < ROWS:
            self.at += 1
            yield when, self.calls
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "when": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self._when = state["at"], state["when"]

    @property
    def epoch(self) -> int:
        return getattr(self, "_when", -1)


class Doubled(Stream):
    def set_epoch(self, epoch: int, scale: int = 1) -> None:
        super().set_epoch(epoch * 2, scale)


class PassesOn(Dataset[Any]):
    def __init__(self) -> None:
        self.inner = Map()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)


class Equal(Map):
    """Is equal to any other, and has no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


KINDS = [Map, Fetched, Stream, Stateful, PassesOn, Equal]


def numbers(values: Any) -> list[int]:
    found: list[int] = torch.as_tensor(values).reshape(-1).tolist()
    return found


def seen(loader: Any) -> set[tuple[int, int]]:
    """What the samples say of the epoch, and of how often it was set."""
    return {
        pair for when, calls in loader for pair in zip(numbers(when), numbers(calls), strict=True)
    }


def make(kind: Any, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": 2, "num_workers": WORKERS, "persistent_workers": True, **options}
    return DataLoader(kind(), **options)


def check(loader: DataLoader[Any]) -> None:
    dataset: Any = loader.dataset
    assert seen(loader) == {(-1, 0)}
    dataset.set_epoch(1)
    assert seen(loader) == {(1, 1)}
    assert seen(loader) == {(1, 1)}  # nothing was set
    dataset.set_epoch(2)
    dataset.set_epoch(3, scale=5)
    assert {when for when, _ in seen(loader)} == {15}
    iterator = iter(loader)
    next(iterator)
    dataset.set_epoch(4)  # is for the next epoch
    assert {when for when, _ in seen(iterator)} == {15}
    assert {when for when, _ in seen(loader)} == {4}


@pytest.mark.parametrize(
    ("kind", "context"),
    [*((kind, "fork") for kind in KINDS), *((kind, "forkserver") for kind in (Map, Stream))],
)
def test_it_reaches_worker_processes(kind: Any, context: str) -> None:
    check(make(kind, multiprocessing_context=context))


@pytest.mark.parametrize("kind", [Map, Stream])
@pytest.mark.parametrize("options", [{"batch_size": None}, {"device": "cpu"}, {"in_order": False}])
def test_on_every_way(kind: Any, options: dict[str, Any]) -> None:
    check(make(kind, **options))


def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise MemoryError("none")

    monkeypatch.setattr("faststep._C.Arena", refuse)
    check(make(Stream))


@pytest.mark.parametrize("kind", [Stream, Stateful])
def test_threads_have_copies_of_a_stream(kind: Any) -> None:
    loader = make(kind, worker_method="thread")
    dataset: Any = loader.dataset
    for epoch in (1, 2):
        dataset.set_epoch(epoch)
        assert seen(loader) == {(epoch, epoch)}


def test_threads_that_share_the_dataset_do_not_set_it_again() -> None:
    loader = make(Map, worker_method="thread")
    dataset: Any = loader.dataset
    seen(loader)
    dataset.set_epoch(1)
    assert seen(loader) == {(1, 1)}


def test_a_method_that_calls_its_base_is_called_as_the_script_does() -> None:
    loaders = make(Stream), make(Doubled)
    for loader in loaders:
        seen(loader)
        loader.dataset.set_epoch(1)  # type: ignore[attr-defined]
    assert [seen(loader) for loader in loaders] == [{(1, 1)}, {(2, 1)}]


def test_datasets_of_one_class_keep_to_themselves() -> None:
    one, other = make(Equal), make(Equal)
    seen(one), seen(other)
    one.dataset.set_epoch(1)  # type: ignore[attr-defined]
    assert [seen(one), seen(other)] == [{(1, 1)}, {(-1, 0)}]


def test_a_call_that_raises_is_not_passed_on() -> None:
    loader = make(Map)
    seen(loader)
    with pytest.raises(TypeError):
        loader.dataset.set_epoch("1", scale="2")  # type: ignore[attr-defined]
    assert seen(loader) == {(-1, 0)}


@pytest.mark.parametrize("batches", range(ROWS))
def test_a_loaded_state_goes_on_in_the_epoch_that_was_set(batches: int) -> None:
    loader = make(Stateful)
    seen(loader)
    dataset: Any = loader.dataset
    dataset.set_epoch(7)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    state = loader.state_dict()
    rest = [numbers(when) for when, _ in iterator]
    other = make(Stateful)
    other.load_state_dict(state)
    assert [numbers(when) for when, _ in other] == rest == [[7, 7]] * (ROWS - batches)


def test_what_is_no_method_is_left_alone() -> None:
    dataset: Any = torch.utils.data.StackDataset([1, 2])
    dataset.set_epoch = print
    loader = DataLoader(dataset, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == len(list(loader)) == 2
    assert dataset.set_epoch is print


def test_a_call_that_raises_in_a_worker_ends_it() -> None:
    class Refuses(Map):
        def set_epoch(self, epoch: int, scale: int = 1) -> None:
            assert get_worker_info() is None

    loader = make(Refuses)
    seen(loader)
    loader.dataset.set_epoch(1)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(loader)
