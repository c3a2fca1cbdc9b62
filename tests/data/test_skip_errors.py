"""skip_errors=: samples that raise are left out of their batch, counted and named."""

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from faststep.data import DataLoader

from .resumable import KeepsState

ROWS = 12
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "process": {"num_workers": 1},
    "processes": {"num_workers": 2, "persistent_workers": True},
    "forkserver": {"num_workers": 1, "multiprocessing_context": "forkserver"},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "device": {"device": "cpu"},
    "device, workers": {"device": "cpu", "num_workers": 2},
}
QUICK = ["alone", "processes", "threads"]


class Map(Dataset[Any]):
    def __init__(self, bad: Any = (), error: type[BaseException] = ValueError) -> None:
        self.bad = set(bad)
        self.error = error
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        if index in self.bad:
            raise self.error(f"no {index}")
        info = get_worker_info()
        assert info is None or info.dataset is self
        return torch.full((3,), float(index))


class Batched(Map):
    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [Map.__getitem__(self, index) for index in indices]


class Stream(IterableDataset[Any]):
    """An iterator that goes on after an error, unless it is a generator."""

    def __init__(self, bad: Any = (), generator: bool = False) -> None:
        self.bad, self.generator = set(bad), generator

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        begin, step = (0, 1) if info is None else (info.id, info.num_workers)
        numbers = iter(range(begin, ROWS, step))
        assert info is None or info.dataset is self
        return (
            (self._one(number) for number in numbers) if self.generator else Mapped(self, numbers)
        )

    def _one(self, number: int) -> Any:
        if number in self.bad:
            raise OSError(f"no {number}")
        return torch.full((3,), float(number))


class Mapped(Iterator[Any]):
    def __init__(self, stream: Stream, numbers: Iterator[int]) -> None:
        self._stream, self._numbers = stream, numbers

    def __next__(self) -> Any:
        return self._stream._one(next(self._numbers))


def rows(loader: Any) -> list[list[int]]:
    return [torch.as_tensor(batch).reshape(-1, 3)[:, 0].int().tolist() for batch in loader]


def without(batches: list[list[int]], bad: Any) -> list[list[int]]:
    kept = [[row for row in batch if row not in bad] for batch in batches]
    return [batch for batch in kept if batch]


def skipped(loader: Any) -> dict[str, Any]:
    found: dict[str, Any] = loader.stats()["skipped"]
    return found


BATCHES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize(
    ("kind", "way", "bad"),
    [
        *((Map, way, [1, 3, 4, 5, 10]) for way in WAYS),
        *((Batched, way, [1, 3, 4, 5, 10]) for way in QUICK),
        *((Map, way, bad) for bad in ([0], [9, 10, 11], range(ROWS)) for way in QUICK),
    ],
)
def test_the_rest_of_the_batch_comes(kind: Any, way: str, bad: Any) -> None:
    loader = DataLoader(kind(bad), 3, skip_errors=True, **WAYS[way])
    for _ in range(1 + (way in QUICK)):
        with pytest.warns(UserWarning, match=rf"sample {bad[0]}( of worker 0)? .*ValueError: no"):
            assert rows(loader) == without(BATCHES, bad)
        found = skipped(loader)
        assert found["samples"] == len(bad)
        assert found["batches"] == len(BATCHES) - len(without(BATCHES, bad))
        assert [named["index"] for named in found["named"]] == list(bad)
        assert {named["error"] for named in found["named"]} == {f"ValueError: no {i}" for i in bad}
        workers = {named["worker"] for named in found["named"]}
        assert workers <= set(range(loader.num_workers)) if loader.num_workers else {None}
    assert len(loader) == len(BATCHES)


@pytest.mark.parametrize("way", QUICK)
def test_one_by_one_and_with_other_samplers(way: str) -> None:
    for options in (
        {"batch_size": None},
        {"batch_sampler": [[11, 1], [1], [0, 1, 2]]},
        {"sampler": [5, 1, 3, 40], "batch_size": 2},
    ):
        loader = DataLoader(Map([1, 40]), skip_errors=True, **options, **WAYS[way])
        plain = torch.utils.data.DataLoader(Map(), **options)  # type: ignore[arg-type]
        with pytest.warns(UserWarning, match="skip_errors"):
            assert rows(loader) == without(rows(plain), [1, 40])


@pytest.mark.parametrize("way", WAYS)
def test_streams_that_go_on(way: str) -> None:
    bad = [1, 4, 5, 7]
    plain = torch.utils.data.DataLoader(Stream(), 2, num_workers=WAYS[way].get("num_workers", 0))
    loader = DataLoader(Stream(bad), 2, skip_errors=True, **WAYS[way])
    with pytest.warns(UserWarning, match=r"OSError: no 1\b"):
        assert rows(loader) == without(rows(plain), bad)
    assert skipped(loader)["samples"] == len(bad)


def test_a_generator_that_raised_is_finished() -> None:
    loader = DataLoader(Stream([5], generator=True), 2, skip_errors=True)
    with pytest.warns(UserWarning, match="sample 5 is left out: OSError: no 5"):
        assert rows(loader) == [[0, 1], [2, 3], [4]]


def test_a_stream_that_raises_without_end_is_an_error() -> None:
    class Broken(Stream):
        def _one(self, number: int) -> Any:
            raise OSError("gone")

        def __iter__(self) -> Iterator[Any]:
            return Mapped(self, iter(int, 1))

    loader = DataLoader(Broken(), 2, skip_errors=True)
    with (
        pytest.warns(UserWarning, match="gone"),
        pytest.raises(RuntimeError, match=r"1001 samples in a row raised.*OSError: gone"),
    ):
        list(loader)


@pytest.mark.parametrize("way", QUICK)
def test_what_is_never_skipped(way: str) -> None:
    with pytest.raises(MemoryError, match="no 1"):
        list(DataLoader(Map([1], MemoryError), 3, skip_errors=True, **WAYS[way]))
    with pytest.raises(ValueError, match="no 1"):
        list(DataLoader(Map([1]), 3, **WAYS[way]))

    def refuse(samples: Any) -> Any:
        raise KeyError("own")

    loader = DataLoader(Map(), 3, skip_errors=True, collate_fn=refuse, **WAYS[way])
    with pytest.raises(KeyError, match="own"):
        list(loader)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_program_can_be_stopped(error: Any) -> None:
    with pytest.raises(error):
        list(DataLoader(Map([1], error), 3, skip_errors=True))


@pytest.mark.parametrize("way", QUICK)
@pytest.mark.parametrize("stream", [False, True])
def test_a_state_counts_what_was_skipped(stream: bool, way: str) -> None:
    bad = [1, 3, 4, 5, 8]
    kind: Any = Stream if stream else Map
    loader = DataLoader(kind(bad), 3, skip_errors=True, **WAYS[way])
    with pytest.warns(UserWarning, match="skip_errors"):
        every = rows(loader)
    for place in range(len(every)):
        loader = DataLoader(kind(bad), 3, skip_errors=True, **WAYS[way])
        other = DataLoader(kind(bad), 3, skip_errors=True, **WAYS[way])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            iterator = iter(loader)
            for _ in range(place):
                next(iterator)
            other.load_state_dict(loader.state_dict())
            assert rows(other) == every[place:]


def test_rows_of_arrays_that_are_not_there() -> None:
    table = TensorDataset(torch.arange(36.0).reshape(12, 3))
    loader = DataLoader(table, 2, sampler=[0, 99, 98, 97, 1], skip_errors=True)
    assert loader.path == "arrays"
    with pytest.warns(UserWarning, match="sample 99 is left out: IndexError"):
        assert [batch[0].tolist() for batch in loader] == [[[0, 1, 2]], [[3, 4, 5]]]
    assert (skipped(loader)["samples"], skipped(loader)["batches"]) == (3, 1)


def test_transforms_see_what_is_left() -> None:
    loader = DataLoader(Map([1]), 3, skip_errors=True, transforms=len, device="cpu")
    with pytest.warns(UserWarning, match="skip_errors"):
        assert list(loader) == [2, 3, 3, 3]


def test_only_where_it_is_asked_for_and_one_warning_per_epoch() -> None:
    plain = DataLoader(Map(), 3)
    assert len(list(plain)) == 4
    assert "skipped" not in (plain.stats() or {})
    loader = DataLoader(Map([1, 2, 7]), 3, skip_errors=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader), list(loader)
    assert len(caught) == 2
    assert caught[0].filename == __file__


def test_few_are_named() -> None:
    loader = DataLoader(range(300), 4, skip_errors=True)  # type: ignore[arg-type]
    assert len(list(loader)) == 75

    class All(Map):
        def __len__(self) -> int:
            return 1000

    loader = DataLoader(All(range(1000)), 4, skip_errors=True)
    with pytest.warns(UserWarning, match="skip_errors"):
        assert list(loader) == []
    assert (skipped(loader)["samples"], len(skipped(loader)["named"])) == (1000, 100)


def test_a_pipe_is_refused() -> None:
    class Pipe(torch.utils.data.IterDataPipe):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ValueError, match="skip_errors: an IterDataPipe"):
        DataLoader(Pipe(), skip_errors=True)


def test_many_samples_that_are_no_list_are_an_error() -> None:
    class Columns(Map):
        def __getitems__(self, indices: list[int]) -> Any:
            if 1 in indices:
                raise ValueError("no 1")
            return {"x": torch.tensor(indices)}

    loader = DataLoader(Columns(), 3, skip_errors=True, collate_fn=dict)
    with pytest.raises(TypeError, match=r"Columns.__getitems__ gives no list: ValueError: no 1"):
        list(loader)


class Counting(KeepsState, Map):
    """Keeps a state: how many samples it made."""

    count, kept = 0, ("count",)

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return super().__getitem__(index) + 100 * self.count


@pytest.mark.parametrize("way", ["alone", "process"])
def test_datasets_keep_their_state(way: str) -> None:
    options = {"skip_errors": True, **WAYS[way]}
    loader = DataLoader(Counting([1, 8]), 3, **options)
    iterator = iter(loader)
    with pytest.warns(UserWarning, match="sample 1"):
        next(iterator)
    state = loader.state_dict()
    rest = rows(iterator)
    other = DataLoader(Counting([1, 8]), 3, **options)
    other.load_state_dict(state)
    with pytest.warns(UserWarning, match="sample 8"):
        assert rows(other) == rest
    assert rest[0] == [403, 504, 605]


def test_workers_end_with_an_epoch_that_is_left() -> None:
    loader = DataLoader(Map([1]), 3, skip_errors=True, num_workers=1)
    iterator: Any = iter(loader)
    (worker,) = iterator._batches._workers
    with pytest.warns(UserWarning, match="skip_errors"):
        next(iterator)
    del iterator
    gc.collect()
    assert not worker.is_alive()
    assert skipped(loader)["samples"] == 1


def test_threads_make_no_files_of_batches() -> None:
    loader = DataLoader(Map([1]), 3, skip_errors=True, num_workers=1, worker_method="thread")
    with pytest.warns(UserWarning, match="skip_errors"):
        assert not any(batch.is_shared() for batch in loader)
