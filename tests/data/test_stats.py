"""What a loader tells of its own speed."""

import time
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from faststep.data import DataLoader
from faststep.data.stats import ALL_OF, MOST_OBJECTS, ONE_IN, _bytes_of
from faststep.data.transforms import Compose, RandomHorizontalFlip

from .shapes import SHAPES, Mapped, tensor
from .torch_and_ours import plain


def slow(index: int) -> torch.Tensor:
    time.sleep(0.002)
    return torch.full((3, 4, 4), float(index))


def samples() -> Mapped:
    return Mapped(slow, 12)


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(12 * 48).reshape(12, 3, 4, 4).float(), torch.arange(12))


def stats_of(loader: DataLoader[Any]) -> dict[str, Any]:
    stats = loader.stats()
    assert stats is not None
    return stats


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["0 workers", "1 worker"])
@pytest.mark.parametrize("method", ["process", "thread"])
@pytest.mark.parametrize("make", [tensors, samples])
def test_every_path_counts(make: Any, method: str, options: dict[str, Any]) -> None:
    loader = DataLoader(make(), 4, worker_method=method, **options)
    assert loader.stats() is None
    for _ in range(2):  # an epoch counts for itself
        total = 0
        for i, batch in enumerate(loader):
            total += sum(t.nbytes for t in (batch if isinstance(batch, list) else [batch]))
            stats = stats_of(loader)
            assert stats["batches"] == i + 1
            assert stats["bytes"] == total
        wait = stats["wait"]
        assert 0 < wait["p50"] <= wait["p95"] <= wait["p99"] <= wait["max"] <= wait["total"]
        assert wait["total"] <= stats["seconds"]
        assert stats["stages"] == {"load": pytest.approx(wait["total"])}
        assert stats["queued"] == 0
        assert stats["page_faults"] >= 0
        assert ("slots" in stats) is (loader.path in ("arrays", "workers"))
        if "slots" in stats:
            assert stats["slots"]["held"] == len(batch if isinstance(batch, list) else [batch])
            del batch
            assert stats_of(loader)["slots"]["held"] == 0


def test_waits_are_the_consumers() -> None:
    loader = DataLoader(samples(), 4)
    list(loader)
    assert stats_of(loader)["wait"]["p50"] >= 4 * 0.002


def test_stages_add_up() -> None:
    compose = Compose([RandomHorizontalFlip()])
    loader = DataLoader(tensors(), 4, device="cpu", transforms=compose)
    iterator = iter(loader)
    next(iterator)
    stats = stats_of(loader)
    assert set(stats["stages"]) == {"load", "device", "transforms"}
    assert all(seconds >= 0 for seconds in stats["stages"].values())
    assert sum(stats["stages"].values()) == pytest.approx(stats["wait"]["total"])
    assert stats["batches"] == 1
    assert stats["queued"] == 2  # on the device, as prefetch_to_device says
    del iterator
    assert stats_of(loader)["queued"] == 0


def test_persistent_workers_begin_anew() -> None:
    loader = DataLoader(samples(), 4, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    list(iterator)
    assert iter(loader) is iterator
    assert stats_of(loader)["batches"] == 0
    next(iterator)
    stats = stats_of(loader)
    assert (stats["batches"], stats["queued"] > 0) == (1, True)


def test_percentiles() -> None:
    loader = DataLoader(TensorDataset(torch.arange(5000)), 1)
    list(loader)
    stats = stats_of(loader)
    assert stats["batches"] == 5000  # more than are kept for percentiles
    assert stats["wait"]["p50"] < stats["wait"]["max"]


class Lazy(Mapping[str, Any]):
    """Makes what it holds when it is asked for it."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError("evaluated")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("asked for its keys")

    def __len__(self) -> int:
        raise AssertionError("asked for its length")


class LazyDict(dict[str, Any]):
    def values(self) -> Any:
        raise AssertionError("evaluated")

    __len__ = __iter__ = __getitem__ = items = values


class LazyList(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("evaluated")

    __len__ = __getitem__ = __iter__


class Noisy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *arguments: Any, **more: Any) -> Any:
        raise AssertionError("asked")

    @property
    def nbytes(self) -> int:
        raise AssertionError("asked")


X = torch.zeros(5, 7)
Pair = namedtuple("Pair", ["a", "b"])


def contains_itself() -> list[Any]:
    batch: list[Any] = [X]
    batch.append(batch)
    return batch


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: X, 1),
        (lambda: Pair(X, {"a": [X, (X,)], "b": "text", "c": 3}), 3),
        (lambda: OrderedDict(a=X), 1),
        (lambda: UserDict(a=X, b={"c": X}), 2),
        (lambda: [X.as_subclass(Noisy), X.to_sparse(), None], 1),
        (lambda: [X, Lazy()], 1),
        (lambda: LazyDict(a=X), 1),
        (lambda: LazyList([X]), 1),
        (lambda: [X] * MOST_OBJECTS, MOST_OBJECTS),
        (lambda: [X] * (MOST_OBJECTS + 1), None),
        (lambda: [X, list(range(MOST_OBJECTS))], None),
        (contains_itself, None),
        (lambda: "text", 0),
        (lambda: None, 0),
    ],
)
def test_bytes_take_a_short_look(make: Callable[[], Any], count: int | None) -> None:
    batch = make()
    assert _bytes_of(batch) == (None if count is None else count * X.nbytes)

    def collate(samples: Any) -> Any:
        return batch

    for workers in (0, 2):
        options: dict[str, Any] = {"num_workers": workers, "worker_method": "thread"}
        loader = DataLoader(samples(), 4, collate_fn=collate, **(options if workers else {}))
        assert [delivered is batch for delivered in loader] == [True] * 3
        assert stats_of(loader)["bytes"] == (None if count is None else 3 * count * X.nbytes)


def test_large_batches_of_python_objects_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty looks take less than one at all that is in such a batch."""
    batch = [[list(range(2048)) for _ in range(2)] for _ in range(32)]
    spent = []
    for most, times, found in ((MOST_OBJECTS, 250, None), (2**30, 5, 0)):
        monkeypatch.setattr("faststep.data.stats.MOST_OBJECTS", most)
        begun = time.thread_time()
        assert [_bytes_of(batch) for _ in range(times)] == [found] * times
        spent.append(time.thread_time() - begun)
    assert spent[0] < spent[1]


COUNT, BATCH, SEED = 14, 4, 7


@pytest.mark.parametrize(("workers", "skips"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("name", SHAPES)
def test_it_comes_as_torchs_does(name: str, workers: int, skips: bool) -> None:
    kind, make, own = SHAPES[name]
    options = {"batch_size": BATCH, "num_workers": workers, **own}
    torch.manual_seed(SEED)
    expected = list(torch.utils.data.DataLoader(kind(make, COUNT), **options))
    after = torch.get_rng_state()

    torch.manual_seed(SEED)
    loader = DataLoader(kind(make, COUNT), **options, skip_errors=skips)
    iterator = iter(loader)
    begun = [next(iterator), next(iterator)]
    state = loader.state_dict()
    assert plain([*begun, *iterator]) == plain(expected)
    assert torch.equal(torch.get_rng_state(), after)
    stats = loader.stats()
    assert stats is not None
    assert stats["batches"] == len(expected)
    assert stats["wait"]["total"] > 0
    assert stats.get("skipped") == ({"samples": 0, "batches": 0, "named": []} if skips else None)

    resumed = DataLoader(kind(make, COUNT), **options, skip_errors=skips)
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
