"""Batches, their order and the random states are those of torch's DataLoader."""

import copy
import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

from faststep.data import ArrayDataset, DataLoader

from .torch_and_ours import assert_same, plain

Pair = namedtuple("Pair", "image label")


def table(rows: int = 50) -> TensorDataset:
    return TensorDataset(torch.arange(rows * 3).float().view(rows, 3), torch.arange(rows))


def nested(rows: int = 50) -> ArrayDataset:
    numbers = np.arange(rows * 4, dtype=np.int16).reshape(rows, 2, 2)
    pair = Pair(torch.arange(rows).bool(), [numbers, (torch.ones(rows, 0),)])
    return ArrayDataset({"x": pair, 3: np.arange(rows, dtype=np.float64)[::-1]})


def subset() -> Subset[Any]:
    return Subset(ConcatDataset([table(20), table(31), table(1)]), [*range(3, 52, 2), -1, 7])


DATASETS = {
    "table": table,
    "nested": nested,
    "subset": subset,
    "range": lambda: Subset(table(), range(40, 4, -3)),
    "split": lambda: random_split(table(), [20, 30])[1],
    "concatenation": lambda: ConcatDataset([nested(7), Subset(nested(9), [1, 8, 1])]),
    "array": lambda: ArrayDataset(np.arange(34, dtype=np.uint8).reshape(17, 2)[::2]),
}


class Draws(Sampler[int]):
    """Asks torch's global generator for each index."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        for _ in range(20):
            yield int(torch.randint(10, ()))


class Batches(Sampler[list[int]]):
    """Batches of many sizes, as lists, tuples, tensors and arrays of many kinds of numbers."""

    def __iter__(self) -> Any:
        yield [3, 1]
        yield (0, 9, 8, 7)
        yield torch.tensor([2, 2, 2])
        yield [np.int64(4), 5]
        yield torch.arange(10)[::3]
        yield [torch.tensor(6)]
        yield range(4)

    def __len__(self) -> int:
        return 7


SAMPLERS = {
    "random": RandomSampler,
    "replacement": lambda d: RandomSampler(d, replacement=True, num_samples=70),
    "few": lambda d: RandomSampler(d, num_samples=5),
    "many": lambda d: RandomSampler(d, num_samples=2 * len(d) + 1),
    "twice": lambda d: RandomSampler(d, num_samples=2 * len(d)),
    "sequential": SequentialSampler,
    "subset": lambda d: SubsetRandomSampler(range(0, len(d), 2)),
    "weighted": lambda d: WeightedRandomSampler([1.0, 2.0, 0.0, 5.0], 13),
    "distributed": lambda d: DistributedSampler(d, 3, 1, seed=5),
    "distributed, short": lambda d: DistributedSampler(d, 3, 2, shuffle=False, drop_last=True),
    "draws": lambda d: Draws(),
    "list": lambda d: [4, 2, -1, -2, 0],
}


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_datasets(name: str, shuffle: bool) -> None:
    got = assert_same(lambda: (DATASETS[name](), {"batch_size": 4, "shuffle": shuffle}))
    assert len(got) > 4


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_samplers(name: str, drop_last: bool, workers: int) -> None:
    def make() -> tuple[Any, dict[str, Any]]:
        dataset = table()
        return dataset, {
            "sampler": SAMPLERS[name](dataset),
            "batch_size": 5,
            "drop_last": drop_last,
        }

    assert_same(make, workers=workers)


@given(
    rows=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    with_generator=st.booleans(),
    shared=st.booleans(),
    stop=st.none() | st.integers(0, 9),
    num_samples=st.none() | st.integers(1, 90),
    replacement=st.booleans(),
)
@settings(max_examples=150)
def test_grid(
    rows: int,
    batch_size: int,
    shuffle: bool,
    drop_last: bool,
    with_generator: bool,
    shared: bool,
    stop: int | None,
    num_samples: int | None,
    replacement: bool,
) -> None:
    """Epochs are broken off, and the generator may be shared by the loader and its sampler."""

    def make() -> tuple[Any, dict[str, Any]]:
        dataset = table(rows)
        generator = torch.Generator().manual_seed(3) if with_generator else None
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "drop_last": drop_last,
            "generator": generator,
        }
        if num_samples is not None:
            own = generator if shared else None
            options["sampler"] = RandomSampler(dataset, replacement, num_samples, own)
        else:
            options["shuffle"] = shuffle
        return dataset, options

    assert_same(make, epochs=3, stop=stop)


def with_workers(name: str, persistent: bool) -> tuple[Any, dict[str, Any]]:
    dataset = table(23)
    generator = torch.Generator().manual_seed(5)
    sampler = {"given": RandomSampler(dataset, generator=generator), "draws": Draws()}.get(name)
    return dataset, {
        "batch_size": 4,
        "sampler": sampler,
        "shuffle": sampler is None,
        "generator": generator,
        "num_workers": 1,
        "prefetch_factor": 2,
        "persistent_workers": persistent,
    }


@pytest.mark.parametrize("name", ["random", "given", "draws"])
@pytest.mark.parametrize("persistent", [False, True])
def test_draws_are_made_when_torchs_workers_make_them(name: str, persistent: bool) -> None:
    """Against torch with real worker processes: the states after each batch too."""
    assert_same(lambda: with_workers(name, persistent), epochs=2)


def test_batch_samplers() -> None:
    assert_same(lambda: (table(), {"batch_sampler": Batches()}))
    assert_same(lambda: (nested(), {"batch_sampler": [[1, 2], [3], [2, 2, 2]]}), workers=1)
    assert_same(lambda: (table(), {"batch_sampler": BatchSampler(range(9), 2, False)}))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "bfloat16"])
@pytest.mark.parametrize("more", ["complex64", "float8_e4m3fn", "float8_e5m2", "uint64", "float64"])
def test_types(dtype: str, more: str) -> None:
    bits = torch.arange(480).byte()

    def make() -> tuple[Any, dict[str, Any]]:
        one = bits.bool() if dtype == "bool" else bits.view(getattr(torch, dtype)).view(60, -1)
        two = bits.view(getattr(torch, more)).view(60, -1)
        return TensorDataset(one[:60], two, torch.empty(60, 2, 0)), {"batch_size": 8}

    assert_same(make, epochs=1)


def test_rows_with_any_stride() -> None:
    base = torch.arange(240).view(20, 12)

    def make() -> tuple[Any, dict[str, Any]]:
        once = torch.arange(6).expand(10, 6)
        return TensorDataset(base[::2, 2:8], once, base[:10, 3]), {"batch_size": 3, "shuffle": True}

    assert_same(make)


def test_large_rows_and_batches() -> None:
    """Several pieces per batch, and rows larger than a piece."""
    data = torch.randn(40, 50_000), torch.arange(40)
    assert_same(lambda: (TensorDataset(*data), {"batch_size": 16, "shuffle": True}))


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_errors_are_torchs_and_the_epoch_goes_on() -> None:
    def make() -> tuple[Any, dict[str, Any]]:
        wrong = [[1, 2], [3, 99], [], ["a"], [None], [4, -51], [-50], [True], [0.5], [7]]
        return table(), {"batch_sampler": wrong}

    got = assert_same(make)
    assert [error for error, *_ in got].count(IndexError) == 8
    assert_same(lambda: (subset(), {"batch_sampler": [[1], [77], [-99], [2]]}))


class Fails(Sampler[int]):
    def __iter__(self) -> Any:
        yield from range(7)
        raise KeyError("no more")

    def __len__(self) -> int:
        return 9


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_sampler_comes_in_its_place(workers: int) -> None:
    make = lambda: (table(), {"sampler": Fails(), "batch_size": 3})  # noqa: E731
    got = assert_same(make, workers=workers)
    assert [kind for kind, *_ in got].count(KeyError) == 2


@pytest.mark.parametrize("path", ["arrays", "torch"])
def test_an_epoch_ends_with_an_error_of_a_sampler_of_torchs(path: str) -> None:
    """Who goes on after errors is not given the same one for ever."""
    options = {"collate_fn": list} if path == "torch" else {}

    def make() -> tuple[Any, dict[str, Any]]:
        return table(), {"sampler": WeightedRandomSampler([0.0] * 50, 50), **options}

    got = assert_same(make, epochs=1, stop=3, path=path)
    assert [kind for kind, *_ in got] == [RuntimeError]


def test_arguments_and_attributes_are_torchs() -> None:
    loader = DataLoader(table(), 4, shuffle=True)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert len(loader) == 13
    assert isinstance(loader.sampler, RandomSampler)
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        loader.batch_size = 3
    with pytest.raises(ValueError, match="mutually exclusive"):
        DataLoader(table(), sampler=[1], shuffle=True)
    assert len(iter(loader)) == 13


@pytest.mark.parametrize("options", [{"timeout": 1}, {"num_workers": 1, "prefetch_factor": 0}])
def test_arguments_that_torch_refuses_with_the_first_batch(options: dict[str, Any]) -> None:
    words = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        with pytest.raises(AssertionError) as raised:
            iter(kind(table(), **options))
        words.append(str(raised.value))
    assert words[0] == words[1]


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "persistent_workers": True, "device": "cpu"}], ids=str
)
def test_a_loader_can_be_copied_and_its_iterator_cannot(options: dict[str, Any]) -> None:
    loader = DataLoader(table(), 4, **options)
    iterator = iter(loader)
    next(iterator)
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.path == "arrays"
        assert type(iter(other)) is type(iterator)
        assert plain(list(other)) == plain(list(loader))
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(iterator)


def test_the_dataset_may_be_changed_between_epochs() -> None:
    dataset = table()
    loader = DataLoader(dataset, 50)
    list(loader)
    dataset.tensors[0].fill_(7)
    assert next(iter(loader))[0].eq(7).all()
    dataset.tensors = (torch.full((50, 1), 8.0),)
    assert next(iter(loader))[0].eq(8).all()


@pytest.mark.parametrize(
    "options", [{}, {"device": "cpu"}, {"num_workers": 1, "worker_init_fn": id}], ids=str
)
def test_several_iterators_at_once(options: dict[str, Any]) -> None:
    loader = DataLoader(table(), 5, **options)
    pairs = list(zip(loader, loader, strict=True))
    assert len(pairs) == 10
    assert all(plain(one) == plain(other) for one, other in pairs)
    assert all(one[0].data_ptr() != other[0].data_ptr() for one, other in pairs)


def test_a_persistent_iterator_begins_again() -> None:
    loader = DataLoader(table(), 5, num_workers=1, persistent_workers=True)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert second is first
    assert len(list(second)) == 10


def test_iterating_after_the_end() -> None:
    iterator = iter(DataLoader(table(), 30))
    assert len(list(iterator)) == 2
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


def test_an_empty_dataset() -> None:
    assert_same(lambda: (TensorDataset(torch.ones(0, 3)), {}))
