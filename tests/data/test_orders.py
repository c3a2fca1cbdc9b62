"""Orders of any length: no memory and no time for what is not asked for yet; KeyedSampler."""

import itertools
import pickle
import sys
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from faststep.data import DataLoader, KeyedSampler
from programs import Programs

from .resumable import goes_on
from .shapes import Mapped
from .torch_and_ours import assert_same, plain, without_sanitizer

N = 1000
DATA = TensorDataset(torch.arange(N))
COUNT = 33_000


def numbers(iterator: Any, batches: int) -> list[list[int]]:
    return [next(iterator)[0].tolist() for _ in range(batches)]


ROWS = Mapped(lambda index: [index], N)  # the same samples, on torch's path


HUGE = """
import resource, sys, time
import torch
from torch.utils.data import *
from faststep.data import DataLoader, KeyedSampler

class Rows(Dataset):
    def __init__(self, length):
        self.length = length
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        return [index]

data = {"arrays": TensorDataset(torch.arange(1000)), "torch": Rows(1000)}[sys.argv[1]]
make = {
    "replacement": lambda: RandomSampler(data, True, int(1e10)),
    "passes": lambda: RandomSampler(data, False, int(1e10)),
    "generator": lambda: RandomSampler(data, True, int(1e10), torch.Generator().manual_seed(3)),
    "sequential": lambda: SequentialSampler(range(int(1e10))),
    "keyed": lambda: KeyedSampler(range(int(1e10))),
}[sys.argv[2]]
if sys.argv[2] in ("sequential", "keyed"):
    data = Rows(int(1e10))
def loader(**options):
    torch.manual_seed(5)
    return DataLoader(data, 100, sampler=make(), **options)
list(DataLoader(TensorDataset(torch.arange(9)), 2))  # what is loaded at the first use
ours = loader()
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 29), -1))
start = time.process_time()
assert len(ours) == int(1e8)
iterator = iter(ours)
for _ in range(400):
    next(iterator)
state = ours.state_dict()
assert len(repr(state)) < 20_000
rest = [next(iterator)[0].tolist() for _ in range(5)]
other = loader()
other.load_state_dict(state)
again = iter(other)
assert [next(again)[0].tolist() for _ in range(5)] == rest
torch.manual_seed(5)
theirs = iter(torch.utils.data.DataLoader(data, 100, sampler=make()))
for _ in range(400):
    next(theirs)
assert [next(theirs)[0].tolist() for _ in range(5)] == rest
assert time.process_time() - start < 60
"""


@without_sanitizer
@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as on Linux")
@pytest.mark.parametrize(
    ("path", "order"),
    [
        *[("arrays", order) for order in ("replacement", "passes", "generator")],
        *[("torch", order) for order in ("replacement", "passes", "generator")],
        *[("torch", order) for order in ("sequential", "keyed")],
    ],
)
def test_ten_billion_samples_cost_what_is_asked_for(
    programs: Programs, path: str, order: str
) -> None:
    done = programs.run(HUGE, path, order)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("data", "workers"), [(DATA, 0), (DATA, 2), (ROWS, 0)])
@pytest.mark.parametrize("replacement", [True, False])
def test_draws_are_torchs_after_each_batch(replacement: bool, data: Any, workers: int) -> None:
    def make() -> tuple[Any, dict[str, Any]]:
        sampler = RandomSampler(data, replacement, COUNT)
        return data, {"batch_size": 331, "sampler": sampler}

    path = "arrays" if isinstance(data, TensorDataset) else "torch"
    assert_same(make, path=path, workers=workers)


class Counted(Sequence[int]):
    def __init__(self, wrong: int = -1) -> None:
        self.asked = 0
        self.wrong = wrong

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: Any) -> Any:
        self.asked += 1
        if self.asked == self.wrong:
            raise KeyError("no such index")
        return index


RESIZED: dict[str, Any] = {
    "in order": lambda data: None,
    "shuffled": RandomSampler,
    "by a generator": lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(1)),
    "of a part": lambda data: SubsetRandomSampler(range(90)),
    "of a rank": lambda data: DistributedSampler(data, 2, 1),
    "asked": lambda data: range(5, 95),
}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sampler", RESIZED)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [TensorDataset(torch.arange(100)), range(100)], ids=type)
def test_another_batch_size_in_the_middle(
    data: Any, workers: int, sampler: str, drop_last: bool
) -> None:
    found = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(0)
        order = RESIZED[sampler](data)
        loader: Any = kind(data, 4, sampler=order, drop_last=drop_last, num_workers=workers)
        seen = []
        for number, batch in enumerate(loader):
            seen.append((plain(batch), torch.default_generator.get_state().tolist()))
            loader.batch_sampler.batch_size = {1: 3, 4: 7, 5: 1, 9: 200}.get(
                number, loader.batch_sampler.batch_size
            )
        found.append(seen)
    assert [batch for batch, _ in found[0]] == [batch for batch, _ in found[1]]
    assert [state for _, state in found[0]] == [state for _, state in found[1]]


def test_a_subset_is_asked_as_it_is_needed() -> None:
    indices = Counted()
    iterator = iter(DataLoader(DATA, 10, sampler=SubsetRandomSampler(indices)))
    assert indices.asked == 0
    numbers(iterator, 3)
    assert indices.asked <= 90
    assert len([*iterator]) == N // 10 - 3


@pytest.mark.parametrize("data", [DATA, ROWS], ids=["arrays", "torch"])
def test_an_error_of_the_indices_comes_in_its_place(data: Any) -> None:
    found = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(1)
        iterator = iter(kind(data, 10, sampler=SubsetRandomSampler(Counted(wrong=57))))
        batches = numbers(iterator, 5)
        with pytest.raises(KeyError):
            next(iterator)
        assert next(iterator, None) is None
        found.append(batches)
    assert found[0] == found[1]


@pytest.mark.parametrize("batches", [0, 1, 4, 10])
@pytest.mark.parametrize("weighted", [True, False])
def test_going_on_where_all_was_drawn_at_once(weighted: bool, batches: int) -> None:
    def make() -> Any:
        weights = torch.arange(N, dtype=torch.float64)
        sampler: Any = WeightedRandomSampler(weights.tolist(), 95)
        return DataLoader(DATA, 10, sampler=sampler if weighted else SubsetRandomSampler(range(95)))

    goes_on(make, batches)


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


def test_all_orders_occur_and_long_ones_mix() -> None:
    """Each of five comes to each place as often; neighbours of a billion are a third apart."""
    five = KeyedSampler(range(5))
    orders = [tuple(five) for _ in range(12_000)]
    assert len(set(orders)) == 120
    for place in zip(*orders, strict=True):
        assert all(2_100 < times < 2_700 for times in Counter(place).values())
    order = torch.tensor([*itertools.islice(KeyedSampler(Huge()), 20_000)], dtype=torch.float64)
    assert abs(float(order.diff().abs().mean()) / len(Huge()) - 1 / 3) < 0.01


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


class Buffer(Dataset[int]):
    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length  # type: ignore[no-any-return]

    def __getitem__(self, index: int) -> int:
        return index


def drawn() -> list[int]:
    return torch.default_generator.get_state().tolist()


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"batch_size": None}], ids=str)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_may_grow_until_torch_asks_for_its_length(workers: int, options: Any) -> None:
    found = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(0)
        buffer = Buffer(3)
        batches = iter(kind(buffer, **{"batch_size": 2, **options}, num_workers=workers))
        buffer.length = 7
        found.append((plain([*batches]), drawn()))
    assert found[0] == found[1]


@pytest.mark.parametrize("length", [-1, 2.5])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's
def test_a_length_that_is_none_is_an_error_in_its_place(workers: int, length: Any) -> None:
    found = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(0)
        seen: list[Any] = []
        try:
            batches = iter(kind(Buffer(length), 2, num_workers=workers))
            seen.append(drawn())
            next(batches)
        except (ValueError, TypeError) as error:
            seen += [type(error), str(error), drawn()]
        found.append(seen)
    assert found[0] == found[1]
