"""Batches on a device whose streams run as late as they may: the order that events give is all."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from faststep.data import DataLoader
from faststep.data.deliver import copies

from . import fake, late

ROWS, BATCH = 24, 3
STEPS = ROWS // BATCH
Pair = namedtuple("Pair", "x y")


def table() -> TensorDataset:
    return TensorDataset(torch.arange(ROWS * 5).view(ROWS, 5).float(), torch.arange(ROWS))


class Samples(Dataset[Any]):
    """What only torch's way takes."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise KeyError(index)
        return torch.arange(5).float() + 5 * index, index

    def __len__(self) -> int:
        return ROWS


DATASETS = {"arrays": table, "torch": Samples}


def want(step: int) -> list[torch.Tensor]:
    rows = torch.arange(step * BATCH, (step + 1) * BATCH)
    return [torch.arange(5).float() + 5 * rows[:, None], rows]


def assert_found(found: list[Any], start: int = 0) -> None:
    for step, tensors in enumerate(found, start):
        for got, expected in zip(tensors, want(step), strict=True):
            assert torch.equal(got, expected), f"batch {step}"


def stream_of(loader: DataLoader[Any]) -> late.Stream:
    assert loader._faststep.device is not None
    stream: late.Stream = copies.copier_of(loader._faststep.device).streams.copies
    return stream


@pytest.mark.parametrize("ahead", [0, 1, 2, 20])
@pytest.mark.parametrize("way", DATASETS)
@pytest.mark.parametrize("first", ["consumer", "copies"])
def test_each_batch_is_read_before_it_is_overwritten(
    device: late.Late, way: str, ahead: int, first: str
) -> None:
    """Rules (a), (c) and (d), for memory that is used again as soon as the host lets go of it."""
    loader = DataLoader(DATASETS[way](), BATCH, device="cuda", prefetch_to_device=ahead)
    assert loader.path == way
    waits = device.machine.calls("cuEventSynchronize")
    found = []
    for _ in range(3):
        for batch in loader:
            assert all(tensor.is_cuda for tensor in batch)
            found.append([device.read(tensor) for tensor in batch])
            del batch
    assert device.machine.calls("cuEventSynchronize") == waits  # the host never waited
    assert device.allocated <= 2 * (ahead + 2) + 2
    for stream in [device.default, stream_of(loader)][:: 1 if first == "consumer" else -1]:
        stream.synchronize()
    for epoch in range(3):
        assert_found(found[epoch * STEPS : (epoch + 1) * STEPS])


def test_the_copies_run_ahead(device: late.Late) -> None:
    """A batch is there, without the consumer's own work, before it is asked for."""
    iterator = iter(DataLoader(table(), BATCH, device="cuda", prefetch_to_device=2))
    uploads = device.machine.calls("cuMemcpyHtoDAsync_v2")
    batch = next(iterator)
    assert device.machine.calls("cuMemcpyHtoDAsync_v2") - uploads == 2 * 3
    device.current.synchronize()
    assert torch.equal(fake.plain(batch[0]), want(0)[0])


def test_consumers_may_change_streams(device: late.Late) -> None:
    """Rule (b): memory of one stream that another one reads is not used again before."""
    loader = DataLoader(table(), BATCH, device="cuda", prefetch_to_device=1)
    other = late.Stream(device)
    iterator = iter(loader)
    found = [[device.read(t) for t in next(iterator)]]  # the second batch is on its way
    with device.use(other):
        batch = next(iterator)
        found.append([device.read(tensor) for tensor in batch])
        places = {tensor.data_ptr() for tensor in batch}
        del batch
    form = torch.empty(BATCH, 5)
    taken = [torch.empty_like(form, device="cuda") for _ in range(6)]
    assert not places & {tensor.data_ptr() for tensor in taken}
    other.synchronize()
    assert_found(found[1:], 1)
    taken += [torch.empty_like(form, device="cuda") for _ in range(6)]
    assert places & {tensor.data_ptr() for tensor in taken}  # now it is
    device.default.synchronize()
    assert_found(found)


def test_work_that_another_thread_adds_meanwhile(
    device: late.Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses a batch and lets go of it, right before the memory is given to the next."""
    loader = DataLoader(table(), BATCH, device="cuda", prefetch_to_device=0)
    iterator = iter(loader)
    batches = [next(iterator)]
    found: list[Any] = []
    empty_like = torch.empty_like

    def let_go_and_allocate(*arguments: Any, **options: Any) -> torch.Tensor:
        if batches and options.get("device"):
            found.append([device.read(tensor) for tensor in batches.pop()])
        return empty_like(*arguments, **options)

    monkeypatch.setattr(torch, "empty_like", let_go_and_allocate)
    allocated = device.allocated
    second = [device.read(tensor) for tensor in next(iterator)]
    assert device.allocated == allocated
    stream_of(loader).synchronize()
    device.default.synchronize()
    assert_found([*found, second])


@pytest.mark.parametrize("way", DATASETS)
def test_undelivered_batches_may_be_dropped(device: late.Late, way: str) -> None:
    """The consumer's next memory is not what a copy will still write to."""
    loader = DataLoader(DATASETS[way](), BATCH, device="cuda", prefetch_to_device=3)
    for batch in loader:
        found = [device.read(tensor) for tensor in batch]
        break
    del batch
    gc.collect()
    form = torch.empty(BATCH, 5)
    source = torch.full((BATCH, 5), 7.0).pin_memory()
    mine = [torch.empty_like(form, device="cuda").copy_(source) for _ in range(6)]
    read = [device.read(tensor) for tensor in mine]
    device.default.synchronize()
    stream_of(loader).synchronize()
    assert_found([found])
    assert all(torch.equal(fake.plain(tensor), source) for tensor in mine)
    assert all(torch.equal(tensor, source) for tensor in read)
    pinned = device.living().pinned
    copies.copier_of(torch.device("cuda")).forget_passed()
    assert device.living().pinned <= pinned - 2 * 3


def test_one_stream_for_all_epochs_and_loaders(device: late.Late) -> None:
    """Rule (e)."""
    for _ in range(3):
        loader = DataLoader(table(), BATCH, device="cuda")
        for _ in range(3):
            assert len(list(loader)) == STEPS
    assert device.streams == 2
    assert stream_of(loader) is stream_of(DataLoader(table(), BATCH, device="cuda:0"))


def test_an_empty_loader(device: late.Late) -> None:
    """Rule (f)."""
    loader = DataLoader(TensorDataset(torch.ones(0, 3)), BATCH, device="cuda")
    assert list(loader) == []
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


def test_what_is_on_the_device_stays_where_it_is(device: late.Late) -> None:
    """A batch that is made on the device, by the consumer's stream."""
    source = torch.arange(4.0).pin_memory()
    made: list[torch.Tensor] = []

    def on_device(samples: Any) -> Any:
        made.append(torch.empty_like(source, device="cuda").copy_(source))
        return made[-1], torch.stack([x for x, _ in samples])

    loader = DataLoader(table(), BATCH, collate_fn=on_device, device="cuda")
    iterator = iter(loader)
    batch = next(iterator)
    assert batch[0] is made[0]
    other = late.Stream(device)
    with device.use(other):
        there, copied = next(iterator)
        found = device.read(there), device.read(copied)
    other.synchronize()
    assert torch.equal(found[0], source)
    assert torch.equal(found[1], want(1)[0])
    device.default.synchronize()  # the copies that were made ahead read `source` too


class Own:
    """Moves itself, and says how it was asked."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.asked: Any = None

    def to(self, device: Any, non_blocking: bool = False) -> Own:
        self.asked = device, non_blocking
        return self


class OwnOfOld(Own):
    def to(self, device: Any) -> Own:  # type: ignore[override]
        self.asked = device
        return self


class Extra(UserDict):  # type: ignore[type-arg]
    """A mapping with something more, and a `to` that is not needed."""

    def to(self, device: Any) -> Any:
        raise AssertionError


def test_containers_keep_their_types(device: late.Late) -> None:
    def nest(samples: Any) -> Any:
        x, y = torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])
        extra = Extra(x=x, name="n")
        extra.note = 5
        return {
            "pair": Pair(x, [y, (x.t(), None, 3)]),
            "extra": extra,
            "text": ["a", b"b"],
            "own": Own(x),
            "old": OwnOfOld(y),
            "strided": x[:, ::2],
            "pinned": x.pin_memory()[:, ::2],
        }

    for number, batch in enumerate(DataLoader(Samples(), BATCH, collate_fn=nest, device="cuda")):
        x, y = want(number)
        assert type(batch) is dict
        assert type(batch["pair"]) is Pair
        assert type(batch["pair"].y) is list
        assert type(batch["pair"].y[1]) is tuple
        assert type(batch["extra"]) is Extra
        assert (batch["extra"].note, batch["extra"]["name"]) == (5, "n")
        assert batch["pair"].y[1][1:] == (None, 3)
        assert batch["text"] == ["a", b"b"]
        assert batch["own"].asked == (torch.device("cuda", 0), True)
        assert batch["old"].asked == torch.device("cuda", 0)
        pairs = [
            (batch["pair"].x, x),
            (batch["pair"].y[0], y),
            (batch["pair"].y[1][0], x.t()),
            (batch["extra"]["x"], x),
            (batch["strided"], x[:, ::2]),
            (batch["pinned"], x[:, ::2]),
        ]
        found = [device.read(tensor) for tensor, _ in pairs]
        device.current.synchronize()
        for got, (_, expected) in zip(found, pairs, strict=True):
            assert torch.equal(got, expected)
        assert batch["pair"].y[1][0].stride() == x.t().stride()


def test_packed_sequences_are_pinned_and_moved_by_their_own_methods(
    device: late.Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collate(samples: Any) -> Any:
        return torch.nn.utils.rnn.pack_sequence([torch.stack([x for x, _ in samples]).reshape(-1)])

    asked: list[Any] = []

    def to(self: Any, *arguments: Any, **options: Any) -> Any:
        asked.append((self.data.is_pinned(), arguments, options))
        return self

    monkeypatch.setattr(torch.nn.utils.rnn.PackedSequence, "to", to)
    for step, packed in enumerate(DataLoader(Samples(), BATCH, collate_fn=collate, device="cuda")):
        assert type(packed) is torch.nn.utils.rnn.PackedSequence
        assert asked.pop() == (True, (torch.device("cuda", 0),), {"non_blocking": True})
        assert torch.equal(packed.data, want(step)[0].reshape(-1))


def test_what_an_object_moved_from_is_kept_until_it_has_moved(device: late.Late) -> None:
    sources: list[weakref.ref[Own]] = []

    class Moving(Own):
        def to(self, device: Any, non_blocking: bool = False) -> Own:
            return Own(self.tensor)

    def collate(samples: Any) -> Any:
        own = Moving(torch.ones(3))
        sources.append(weakref.ref(own))
        return own

    loader = DataLoader(Samples(), BATCH, collate_fn=collate, device="cuda", prefetch_to_device=0)
    iterator = iter(loader)
    assert type(next(iterator)) is Own
    next(iterator)
    assert sources[0]() is not None
    device.machine.synchronize()
    next(iterator)
    assert sources[0]() is None
    assert sources[2]() is not None


def test_batches_from_a_device_to_the_host(device: late.Late) -> None:
    def collate(samples: Any) -> Any:
        return fake.claim(torch.tensor([y for _, y in samples])), torch.eye(2).to_sparse()

    loader = DataLoader(Samples(), BATCH, collate_fn=collate, device="cpu")
    for number, (y, sparse) in enumerate(loader):
        assert type(y) is torch.Tensor
        assert torch.equal(y, want(number)[1])
        assert sparse.is_sparse


def test_errors_come_in_their_order(device: late.Late) -> None:
    iterator = iter(DataLoader(Samples(bad=7), BATCH, device="cuda", prefetch_to_device=4))
    found = [[device.read(t) for t in next(iterator)] for _ in range(2)]
    with pytest.raises(KeyError):
        next(iterator)
    rest = [[device.read(t) for t in batch] for batch in iterator]
    assert len(rest) == STEPS - 3
    device.current.synchronize()
    assert_found(found)
    assert_found(rest, 3)


def test_an_error_of_the_driver_is_raised(device: late.Late) -> None:
    iterator = iter(DataLoader(table(), BATCH, device="cuda", prefetch_to_device=1))
    found = [device.read(tensor) for tensor in next(iterator)]
    device.machine.fail("cuMemcpyHtoDAsync_v2", 2, 700)
    second = [device.read(tensor) for tensor in next(iterator)]
    with pytest.raises(AssertionError, match="cuMemcpyHtoDAsync_v2 returned 700"):
        next(iterator)
    device.current.synchronize()
    assert_found([found, second])


def test_a_thread_may_fetch_for_another(device: late.Late) -> None:
    loader = DataLoader(table(), BATCH, device="cuda")
    batches: list[Any] = []
    thread = threading.Thread(target=lambda: batches.extend(loader))
    thread.start()
    thread.join()
    found = [[device.read(tensor) for tensor in batch] for batch in batches]
    device.current.synchronize()
    assert_found(found)


def test_pinned_batches_are_gathered_in_place(device: late.Late) -> None:
    """With pin_memory=True the memory is torch's, and there is no second copy."""
    loader = DataLoader(table(), BATCH, pin_memory=True)
    allocations = device.machine.calls("cuMemHostAlloc")
    batches = list(loader)
    assert device.machine.calls("cuMemHostAlloc") - allocations == 2 * STEPS
    assert all(tensor.is_pinned() for batch in batches for tensor in batch)
    assert_found(batches)
    assert loader._faststep.slots is not None
    assert loader._faststep.slots.counts() == (0, 0, 0)
    pinned = device.living().pinned
    kept = batches[0][1]
    del batches
    gc.collect()
    assert device.living().pinned == pinned - 2 * STEPS + 1
    assert torch.equal(kept, want(0)[1])


@pytest.mark.parametrize("way", DATASETS)
@pytest.mark.parametrize("target", [None, "cpu"])
def test_transformed_batches_are_pinned(device: late.Late, way: str, target: Any) -> None:
    def doubled(batch: Any) -> Any:
        return [tensor * 2 for tensor in batch]

    options = {"pin_memory": True, "device": target, "transforms": doubled}
    batches = list(DataLoader(DATASETS[way](), BATCH, **options))
    assert all(tensor.is_pinned() for batch in batches for tensor in batch)
    for step, batch in enumerate(batches):
        assert all(map(torch.equal, batch, doubled(want(step))))


def test_batches_for_the_device_are_gathered_where_it_reads(device: late.Late) -> None:
    allocations = device.machine.calls("cuMemHostAlloc")
    list(DataLoader(table(), BATCH, device="cuda"))
    assert device.machine.calls("cuMemHostAlloc") - allocations == 2 * STEPS


def test_capturing_is_refused(device: late.Late, monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = iter(DataLoader(table(), BATCH, device="cuda"))
    found = [device.read(tensor) for tensor in next(iterator)]
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="captured"):
            next(iterator)
    found_after = [device.read(tensor) for tensor in next(iterator)]
    device.current.synchronize()
    assert_found([found, found_after])
