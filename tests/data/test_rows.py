"""Large tensors of samples are copied into the batch at once, where nobody can see a difference."""

import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from faststep.data import DataLoader
from faststep.data.workers import packed_batch
from faststep.data.workers.arena import KeyedArena
from faststep.data.workers.processes import Packer

from .shapes import Mapped
from .torch_and_ours import plain, without_sanitizer

COUNT, SHAPE = 4, (30, 1000)
Pair = namedtuple("Pair", "x y")
Make = Callable[[int], Any]


class Counting:
    """An arena's memory, and how often something was copied into it as a whole."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.copies = memory, 0

    def put(self, address: int, size: int) -> int:
        self.copies += size > 10_000
        return int(self.memory.put(address, size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)


def fetched(make: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """The batch, unpacked, and how many large tensors were stacked late."""
    arena = KeyedArena()
    memory, arena.memory = arena.memory, Counting(arena.memory)  # type: ignore[assignment]
    late = []
    stack = torch.stack

    def noting(tensors: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        late.extend(tensor for tensor in tensors if tensor.nbytes > 10_000)
        return stack(tensors, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", noting)
        batch = Packer(default_collate, arena).fetch(Mapped(make, COUNT), list(range(COUNT)))
    assert arena.memory.copies == 0  # type: ignore[attr-defined]
    arena.memory = memory
    return packed_batch._unpack(*batch._parts), len(late)


def fresh(index: int) -> torch.Tensor:
    return torch.full(SHAPE, float(index))


ALONE: dict[str, Make] = {
    "tensor": fresh,
    "tuple": lambda i: (fresh(i), i),
    "list": lambda i: [fresh(i), fresh(-i), "text"],
    "dict": lambda i: {"x": fresh(i), "y": torch.tensor(i)},
    "transposed": lambda i: (fresh(i).add_(torch.arange(1000)).t_(), i),
    "bytes": lambda i: torch.full((100_000,), i, dtype=torch.uint8),
}


@pytest.mark.parametrize("kind", ALONE)
def test_what_nobody_else_has_is_copied_early(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, late = fetched(ALONE[kind], monkeypatch)
    assert plain(batch) == plain(default_collate([ALONE[kind](i) for i in range(COUNT)]))
    assert late == 0


kept = [fresh(i) for i in range(COUNT)]
buffer = torch.zeros(SHAPE)
inner = [(fresh(i), i) for i in range(COUNT)]
seen: list[Any] = []


def in_the_buffer(index: int) -> torch.Tensor:
    return buffer.fill_(index)


def changed_later(index: int) -> torch.Tensor:
    """The next sample changes this one."""
    seen.append(fresh(index))
    if index:
        seen[-2].add_(100)
    return seen[-1]


def changed_through_its_tuple(index: int) -> Any:
    seen.append((fresh(index), index))
    if index:
        seen[-2][0].add_(100)
    return seen[-1]


def changed_through_numpy(index: int) -> torch.Tensor:
    seen.append(numpy.full(SHAPE, index, dtype=numpy.float32))
    if index:
        seen[-2] += 100
    return torch.from_numpy(seen[-1])


def changed_through_a_view(index: int) -> torch.Tensor:
    whole = fresh(index)
    seen.append(whole[:3])
    if index:
        seen[-2].add_(100)
    return whole


def changed_through_its_storage(index: int) -> torch.Tensor:
    whole = fresh(index)
    seen.append(whole.untyped_storage())
    if index:
        seen[-2].fill_(0)
    return whole


def changed_through_a_weak_reference(index: int) -> torch.Tensor:
    whole = fresh(index)
    if index and seen[-1]() is not None:
        seen[-1]().add_(100)
    seen.append(weakref.ref(whole))
    return whole


def changed_through_c(index: int) -> torch.Tensor:
    """Kept by torch itself, as what autograd saved."""
    whole = fresh(index)
    seen.append(torch.ones(SHAPE, requires_grad=True) * whole)
    if index:
        seen[-2].grad_fn._saved_other.data.add_(100)
    return whole


SHARED: dict[str, Make] = {
    "kept": lambda i: kept[i],
    "in a tuple": lambda i: (kept[i], i),
    "in a tuple that is kept": lambda i: inner[i],
    "the same one twice": lambda i: [x := fresh(i), x],
    "a part": lambda i: kept[i][1:],
    **{
        name: function
        for name, function in list(globals().items())
        if name.startswith("changed_") or name == "in_the_buffer"
    },
}


@pytest.mark.parametrize("kind", SHARED)
def test_what_somebody_else_has_is_stacked_late(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen.clear()
    want = plain(default_collate([SHARED[kind](i) for i in range(COUNT)]))
    seen.clear()
    batch, late = fetched(SHARED[kind], monkeypatch)
    assert plain(batch) == want
    assert late >= COUNT


OTHERS: dict[str, Make] = {
    "named tuple": lambda i: Pair(fresh(i), i),
    "ordered": lambda i: OrderedDict(x=fresh(i)),
    "nested": lambda i: (i, {"x": [fresh(i)]}),
    "small": lambda i: torch.full((5,), i),
    "some kept": lambda i: fresh(i) if i % 2 else kept[i],
    "some kept later": lambda i: kept[i] if i % 2 else fresh(i),
    "some of another kind": lambda i: (fresh(i), 5 if i < 2 else 6),
    "text": lambda i: (f"{i}", fresh(i)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_all_else_is_as_it_was(kind: str) -> None:
    make = OTHERS[kind]
    arena = KeyedArena()
    batch = Packer(default_collate, arena).fetch([make(i) for i in range(COUNT)], [0, 2, 1])
    want = default_collate([make(i) for i in (0, 2, 1)])
    assert plain(packed_batch._unpack(*batch._parts)) == plain(want)
    batch = Packer(default_collate, arena).fetch(Mapped(make, COUNT), [0, 2, 1])
    got = packed_batch._unpack(*batch._parts)
    assert type(got) is type(want)
    assert plain(got) == plain(want)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: torch.ones(20_000 + i),
        lambda i: (fresh(i), *[0] * i),
        lambda i: {"x": fresh(i)} if i < 2 else {},
        lambda i: fresh(i) if i < 2 else 1 / 0,
        lambda i: fresh(i) if i < 2 else fresh(i).to_sparse(),
    ],
)
def test_errors_are_torchs_and_leave_no_block(make: Make) -> None:
    arena = KeyedArena()
    outcomes = []
    for fetch in (
        lambda: default_collate([make(i) for i in range(COUNT)]),
        lambda: packed_batch._unpack(
            *Packer(default_collate, arena).fetch(Mapped(make, COUNT), list(range(COUNT)))._parts
        ),
    ):
        try:
            outcomes.append(plain(fetch()))
        except Exception as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]
    assert arena.memory.counts()["taken"] == arena.memory.counts()["held"] == 0


def test_who_fetches_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    packer, indices = Packer(default_collate, KeyedArena()), list(range(COUNT))
    assert packer.fetch(Mapped(fresh, COUNT), range(COUNT)) is NotImplemented
    assert Packer(list, KeyedArena()).fetch(Mapped(fresh, COUNT), indices) is NotImplemented
    monkeypatch.setattr(Mapped, "__getitems__", lambda self, many: [], raising=False)
    assert packer.fetch(Mapped(fresh, COUNT), indices) is NotImplemented
    monkeypatch.setitem(default_collate_fn_map, tuple, lambda batch, **_: batch)
    monkeypatch.setattr(Mapped, "__getitems__", None)
    assert packer.fetch(Mapped(fresh, COUNT), indices) is NotImplemented


def test_dtypes_in_workers() -> None:
    """A batch in a worker has the dtype of its first sample."""
    kinds = torch.float32, torch.float64, torch.float64
    data = Mapped(lambda index: torch.full((20_000,), index / 3, dtype=kinds[index % 3]), 8)
    loaders = [kind(data, 2, num_workers=1) for kind in (torch.utils.data.DataLoader, DataLoader)]
    assert plain(list(loaders[0])) == plain(list(loaders[1]))


def placed(index: int) -> Any:
    sample = torch.full((300_000,), float(index))
    return sample, sample.data_ptr()


@without_sanitizer
def test_in_workers() -> None:
    """Once malloc has found its way, samples of one batch follow each other in one place."""
    found = []
    for number, (batch, places) in enumerate(DataLoader(Mapped(placed, 64), 8, num_workers=1)):
        assert batch[:, ::50_000].unique().tolist() == [8.0 * number + i for i in range(8)]
        found.append(len(set(places.tolist())))
    assert found[-1] < 8
