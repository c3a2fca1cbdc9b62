"""Worker processes: torch's batches, through shared memory that is used again."""

import gc
import os
import resource
import traceback
from collections import Counter, UserDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

import faststep.data
from faststep.data import ArrayDataset, DataLoader, converted

from .shapes import Mapped
from .torch_and_ours import plain, without_sanitizer

Pair = namedtuple("Pair", "first second")


class Own(UserDict[str, Any]):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and plain(self.data) == plain(other.data)


@pytest.fixture(autouse=True)
def _no_iterator_stays() -> Iterator[None]:
    """One of torch's that is collected in a worker of another one keeps it from ending."""
    yield
    gc.collect()


class Tagged(torch.Tensor):
    pass


class Custom:
    def __init__(self, value: Any) -> None:
        self.value = value


class Mixed(Dataset[Any]):
    """Every kind of thing that default_collate knows."""

    draws = True

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        tensor = torch.arange(12).view(3, 4) + index
        return {
            "kinds": [tensor.to(kind) for kind in (torch.float32, torch.bfloat16, torch.bool)],
            "transposed": tensor.t(),
            "complex": torch.full((2,), index + 1j),
            "array": numpy.full((2, 3), index, dtype=numpy.int16),
            "numbers": (index, float(index), index % 2 == 0, numpy.float32(index)),
            "text": (str(index), b"bytes"),
            "pair": Pair(torch.tensor(index), [index, index]),
            "own": Own({"a": index}),
            "empty": torch.empty(0, 3),
            "random": torch.rand(2) if self.draws else 0,
        }


class Lines(IterableDataset[Any]):
    """Of different lengths in each worker."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for i in range(5 + 6 * info.id):
            yield torch.tensor([info.id, i]), info.seed


def list_of(loader: Any, epochs: int) -> tuple[list[Any], Any]:
    torch.default_generator.manual_seed(5)
    batches = [plain(batch) for _ in range(epochs) for batch in loader]
    return batches, torch.default_generator.get_state().tolist()


def assert_same(dataset: Any, epochs: int = 2, **options: Any) -> DataLoader[Any]:
    options.setdefault("num_workers", 2)
    want = list_of(torch.utils.data.DataLoader(dataset, **options), epochs)
    ours: DataLoader[Any] = DataLoader(dataset, **options)
    assert list_of(ours, epochs) == want
    assert ours.path == "workers"
    return ours


def arena_of(loader: DataLoader[Any]) -> Any:
    assert loader._faststep.workers is not None
    return loader._faststep.workers._latest


def counts(loader: DataLoader[Any]) -> dict[str, int]:
    gc.collect()
    arena_of(loader).unpin_what_no_child_sees()
    found: dict[str, int] = arena_of(loader).memory.counts()
    return found


def nested(samples: list[Any]) -> Any:
    """default_collate inside, views, one tensor twice, and an object of the user."""
    batch = default_collate(samples)
    whole = torch.arange(60.0).view(3, 20)
    return {
        "batch": batch,
        "object": Custom((batch["array"], numpy.arange(9000))),
        "twice": [whole, whole],
        "views": [whole[:, 3:9], whole.t(), torch.arange(10_000)[5:8]],
        "expanded": torch.ones(1).expand(3, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "two over one": [batch["array"].numpy(), batch["array"][:1], batch["array"][:1]],
        "readonly": numpy.frombuffer(bytes(50_000), dtype=numpy.int8),
        "swapped": numpy.arange(9000, dtype=">i4"),
    }


def opened(batch: Any) -> Any:
    """With what `plain` does not look into made plain."""
    parts = batch["object"].value
    arrays = [batch.pop("readonly"), batch.pop("swapped"), parts[1]]
    batch["two over one"][0] = batch["two over one"][0].tolist()
    flags = [(a.dtype, a.flags.writeable, a.tolist()) for a in arrays]
    batch["sparse"] = batch["sparse"].to_dense()
    batch["parameter"] = (type(batch["parameter"]), plain(batch["parameter"]))
    return {**batch, "object": parts[0], "flags": flags}


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_size": 3, "num_workers": 1, "persistent_workers": True, "shuffle": True},
        {"batch_size": 4, "drop_last": True, "in_order": False, "num_workers": 1},
        {"batch_size": None},
        {"batch_sampler": [[3, 1], [2], [0, 5, 7]]},
    ],
)
def test_batches_are_torchs(options: dict[str, Any]) -> None:
    ours = assert_same(Mixed(), **options)
    assert counts(ours)["taken"] == counts(ours)["held"] == 0


def test_workers_may_be_started_otherwise() -> None:
    """By forkserver, as by spawn: the arena goes along with what starts the worker."""
    data = [{"x": torch.full((5,), float(i)), "name": str(i)} for i in range(9)]
    ours = DataLoader(data, 2, num_workers=1, multiprocessing_context="forkserver")
    assert plain(list(ours)) == plain(list(torch.utils.data.DataLoader(data, 2)))
    assert arena_of(ours).in_blocks == 5


@pytest.mark.parametrize("persistent", [False, True])
def test_iterable_datasets_keep_their_rotation(persistent: bool) -> None:
    assert_same(Lines(), batch_size=2, drop_last=True, persistent_workers=persistent)
    assert_same(Lines(), batch_size=None)


def test_any_collate_function() -> None:
    results = []
    for library in (torch.utils.data, faststep.data):
        loader = library.DataLoader(Mixed(), 4, num_workers=1, collate_fn=nested)
        torch.default_generator.manual_seed(1)
        results.append([])
        for batch in loader:
            first, again = batch["twice"]
            assert first is again
            part, other, _ = batch["views"]
            part.fill_(-1)
            assert bool((first == other.t()).all())  # they share their storage
            assert int((first == -1).sum()) == 18
            results[-1].append(plain(opened(batch)))
    assert results[0] == results[1]
    reasons = arena_of(loader).otherwise
    assert {"a Parameter", "not a dense tensor"} <= set(reasons)
    assert "torch transported" in loader.explain()


def parts_of_a_tensor(samples: object) -> list[torch.Tensor]:
    whole = torch.arange(1000)
    return [whole, whole[3], whole[::500], whole[10:20]]


def parts_of_an_array(samples: object) -> list[torch.Tensor]:
    whole = numpy.arange(1000)
    return [torch.from_numpy(part) for part in (whole[:10], whole, whole[:5], whole)]


@pytest.mark.parametrize("collate", [parts_of_a_tensor, parts_of_an_array])
def test_parts_of_one_memory_are_parts_where_they_are_in_torch(collate: Any) -> None:
    results = []
    for library in (torch.utils.data, faststep.data):
        (batch,) = library.DataLoader(range(2), 2, num_workers=1, collate_fn=collate)
        seen = [plain(batch)]
        for tensor in batch:
            tensor.fill_(-1)
            seen.append([int((other == -1).sum()) for other in batch])
        results.append(seen)
    assert results[0] == results[1]


def test_a_subclass_among_plain_tensors() -> None:
    for size in (3, 50_000):
        tagged = torch.ones(size).as_subclass(Tagged)
        for pair in ([torch.zeros(size), tagged], [tagged, torch.zeros(size)]):
            assert_same(pair, epochs=1, batch_size=2, num_workers=1)


def test_collate_functions_that_users_register(monkeypatch: pytest.MonkeyPatch) -> None:
    def custom(batch: Any, *, collate_fn_map: Any) -> Any:
        return torch.stack([item.value for item in batch]) * 2

    monkeypatch.setitem(default_collate_fn_map, Custom, custom)
    data = [Custom(torch.ones(3) * i) for i in range(6)]
    assert_same(data, batch_size=2)

    def tensors(batch: Any, *, collate_fn_map: Any) -> Any:
        return ["mine", torch.cat([item[None] for item in batch])]

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, tensors)
    assert_same([torch.ones(3) * i for i in range(6)], batch_size=2)


@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(3), torch.ones(4)],
        [torch.ones(3, dtype=torch.int64), torch.ones(3)],
        [torch.ones(3), 2.0],
        [torch.ones(3, requires_grad=True)] * 2,
        [torch.eye(3).to_sparse()] * 2,
        [object(), object()],
        [numpy.array(["a"]), numpy.array(["b"])],
    ],
)
def test_errors_of_default_collate_are_torchs(samples: list[Any]) -> None:
    texts = []
    for library in (torch.utils.data, faststep.data):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            list(library.DataLoader(samples, 2, num_workers=1))
        lines = str(caught.value).splitlines()
        texts.append((caught.type, lines[0], lines[-1]))
        traceback.clear_frames(caught.tb)  # else torch's iterator takes 5 s to end
    assert texts[0] == texts[1]


class Wide(Dataset[Any]):
    def __init__(self, length: int = 40, width: int = 50_000) -> None:
        self.length, self.width = length, width

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.width,), float(index)), index


def test_memory_is_used_again() -> None:
    ours = DataLoader(Wide(), 2, num_workers=2)
    places: Counter[int] = Counter()
    for _ in range(3):
        for batch, _ in ours:
            places[batch.data_ptr()] += 1
            del batch
    assert len(places) <= 7
    assert sum(places.values()) == 60
    assert arena_of(ours).otherwise == {}
    assert arena_of(ours).in_blocks == 120


def test_batches_may_be_kept() -> None:
    ours = DataLoader(Wide(), 2, num_workers=2)
    kept = list(ours)
    for _ in range(2):
        list(ours)
    for number, (batch, labels) in enumerate(kept):
        assert labels.tolist() == [2 * number, 2 * number + 1]
        assert batch.unique().tolist() == [2.0 * number, 2.0 * number + 1]
    assert counts(ours)["held"] == 40
    few = [labels for _, labels in kept]
    del kept, batch, labels
    assert counts(ours)["held"] == 20
    assert counts(ours)["backed"] < 20_000_000
    assert torch.cat(few).tolist() == list(range(40))


@pytest.mark.parametrize(
    "keep", [lambda b: b[1:, ::2], torch.Tensor.detach, torch.Tensor.numpy, lambda b: b.t()[3:]]
)
def test_the_last_tensor_over_a_block_frees_it(keep: Callable[[Any], Any]) -> None:
    ours = DataLoader(Wide(), 2, num_workers=1)
    kept = keep(next(iter(ours))[0])
    want = torch.as_tensor(kept).clone()
    assert counts(ours)["held"] == 1
    for batch, _ in ours:
        batch.fill_(-1)
    del batch, _
    assert torch.equal(torch.as_tensor(kept), want)
    assert counts(ours)["held"] == 1
    del kept
    assert counts(ours)["held"] == 0


def test_a_batch_outlives_everything() -> None:
    ours = DataLoader(Wide(), 2, num_workers=1)
    batch, _ = next(iter(ours))
    del ours
    gc.collect()
    assert batch[:, 7].tolist() == [0.0, 1.0]


class Hoarder:
    """A collate function that returns its first batch again and again."""

    def __init__(self) -> None:
        self.first: Any = None

    def __call__(self, samples: Any) -> Any:
        batch = default_collate(samples)
        if self.first is None:
            self.first = batch
        return [self.first, batch]


def test_a_batch_that_its_worker_keeps() -> None:
    for first, (batch, labels) in DataLoader(Wide(), 2, num_workers=1, collate_fn=Hoarder()):
        assert first[0].unique().tolist() == [0.0, 1.0]
        assert batch.unique().tolist() == labels.tolist()


def test_pinned_batches_are_torchs() -> None:
    ours = DataLoader(Wide(4), 2, num_workers=1, pin_memory=True)
    why = "as only of that it knows when a script's copies have passed; device= needs none"
    assert f"copies them into page-locked memory of its own, {why}" in ours.explain()


class Ragged(Wide):
    def __getitem__(self, index: int) -> Any:
        return torch.full((1 + index * 7919 % self.width,), float(index))


def test_batches_of_many_lengths_take_little_memory() -> None:
    ours: DataLoader[Any] = DataLoader(Ragged(120), num_workers=2)
    for number, batch in enumerate(ours):
        assert batch.shape[1] == 1 + number * 7919 % 50_000
        assert batch.unique().tolist() == [float(number)]
    del batch
    assert counts(ours)["backed"] < 3_000_000


@without_sanitizer
def test_no_descriptor_and_hardly_a_page_fault_per_batch() -> None:
    ours = DataLoader(Wide(160), 2, num_workers=1)
    seen = []
    for batch, _ in ours:
        batch.sum()
        files = len(os.listdir("/proc/self/fd"))
        seen.append((files, resource.getrusage(resource.RUSAGE_SELF).ru_minflt))
    assert {files for files, _ in seen} == {seen[0][0]}
    faults = seen[-1][1] - seen[len(seen) // 2][1]
    assert faults / (len(seen) // 2) < 10


def files(index: int) -> Any:
    return " ".join(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd")), torch.ones(3)


def test_nothing_has_a_name() -> None:
    ours = DataLoader(Mapped(files, 4), 2, num_workers=1, collate_fn=default_collate)
    seen = [batch[:2] for batch in ours]
    for names, _ in seen:
        assert not any("torch_" in name and f"_{os.getpid()}_" in name for name in map(str, names))
    assert len({tuple(numbers.tolist()) for _, numbers in seen}) == 1


def test_what_is_converted_is_the_same_in_a_worker() -> None:
    numbers = torch.arange(24, dtype=torch.uint8).view(4, 2, 3)
    dataset = ArrayDataset(converted(numbers, torch.float16, scale=0.1, mean=(1, 2), std=3))
    gathered = DataLoader(dataset, 4)
    processes = DataLoader(dataset, 4, num_workers=1, collate_fn=torch.stack)
    assert (gathered.path, processes.path) == ("arrays", "workers")
    assert plain(next(iter(processes))) == plain(next(iter(gathered)))
