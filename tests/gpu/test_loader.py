"""Batches of the loader on a CUDA device: copied ahead, and never a wait on the host.

In a rehearsal copies are done at once; tests/device/test_prefetch.py has the late ones.
"""

import ctypes
import gc
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from faststep.data import DataLoader
from faststep.data.deliver.copies import CudaStreams, copier_of

from .common import CUDA, REHEARSAL, needs_two_devices, no_synchronization

ROWS, BATCH, WIDTH = 60, 4, 300 if REHEARSAL else 30_000
LATE = 20_000_000  # clock cycles: some 10 ms


@pytest.fixture(autouse=True)
def _copies(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if REHEARSAL:
        from device import fake, late
        from faststep.data.deliver import copies

        monkeypatch.setattr(copies, "_copiers", {})
        late.start(monkeypatch, fake.Machine()).machine.lag(0)


def rows() -> torch.Tensor:
    return torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)


def table() -> TensorDataset:
    return TensorDataset(rows(), torch.arange(ROWS))


class Samples(Dataset[Any]):
    """What only torch's way takes."""

    def __init__(self) -> None:
        self.rows = rows()

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index

    def __len__(self) -> int:
        return ROWS


WAYS = ("arrays", "torch", "workers")


def loader_of(way: str, **options: Any) -> DataLoader[Any]:
    if way == "workers":
        options["num_workers"] = 2
    loader: Any = DataLoader(table() if way == "arrays" else Samples(), BATCH, **options)
    assert loader.path == way
    return loader


def assert_whole(found: list[Any]) -> None:
    torch.cuda.synchronize()
    assert torch.equal(torch.cat([x.cpu() for x, _ in found]), rows())
    assert torch.equal(torch.cat([y.cpu() for _, y in found]), torch.arange(ROWS))


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_slow_consumer(way: str, ahead: int) -> None:
    """Each batch is used late and dropped at once, so that all memory is used again."""
    loader = loader_of(way, device="cuda", prefetch_to_device=ahead)
    for _ in range(3):
        found = []
        for x, y in loader:
            assert x.device == y.device == CUDA
            torch.cuda._sleep(LATE)
            found.append((x * 1.0, y * 1))
            del x, y
        assert_whole(found)


@pytest.mark.parametrize("way", WAYS)
def test_the_host_never_waits(way: str) -> None:
    loader = loader_of(way, device="cuda")
    list(loader)  # takes memory
    with no_synchronization():
        found = list(loader)
    assert_whole(found)


def test_consumers_that_change_streams() -> None:
    loader = DataLoader(table(), BATCH, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(3):
        found = []
        iterator = iter(loader)
        for step in range(ROWS // BATCH):
            with torch.cuda.stream(streams[step % 3]):
                x, y = next(iterator)
                torch.cuda._sleep(LATE)
                found.append((x * 1.0, y * 1))
                del x, y
        assert_whole(found)


@pytest.mark.parametrize("way", WAYS)
def test_breaking_off(way: str) -> None:
    """Memory that a copy will still write to is nobody else's."""
    loader = loader_of(way, device="cuda", prefetch_to_device=3)
    for _ in range(3):
        torch.cuda._sleep(LATE)  # the copies wait for it
        for _ in loader:
            break
        mine = [torch.full((BATCH, WIDTH), 7.0, device=CUDA) for _ in range(5)]
        torch.cuda.synchronize()
        assert all(bool((tensor == 7.0).all()) for tensor in mine)
    assert_whole(list(loader))


@pytest.mark.parametrize("way", ["arrays", "torch"] if REHEARSAL else WAYS)
def test_pinned_batches_may_be_copied_and_dropped(way: str) -> None:
    """A script's own copies: torch knows the memory, and gives it to nobody before they passed."""
    loader = loader_of(way, pin_memory=True)
    for _ in range(3):
        found = []
        for x, y in loader:
            assert x.is_pinned()
            assert y.is_pinned()
            torch.cuda._sleep(LATE)
            found.append((x.to(CUDA, non_blocking=True), y.to(CUDA, non_blocking=True)))
            del x, y
        assert_whole(found)


def is_locked(address: int) -> bool:
    """Whether the memory is page-locked for the driver; it need not be there any more."""
    memory = (ctypes.c_ubyte * 4096).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).is_pinned()


class Holder:
    """What only its user knows the inside of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def in_a_holder(samples: Any) -> Any:
    x, labels = default_collate(samples)
    return x, labels, Holder(x)


def test_blocks_of_workers_are_locked_where_only_the_copy_sees_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a script can reach is ordinary memory: its copies are over when they return."""
    addresses = set()
    allocate = CudaStreams.allocate

    def noting(streams: CudaStreams, tensor: torch.Tensor) -> Any:
        pair = allocate(streams, tensor)
        assert pair is not None
        assert pair[1].is_pinned()
        addresses.add(pair[1].data_ptr())
        return pair

    monkeypatch.setattr(CudaStreams, "allocate", noting)
    loader = loader_of("workers", collate_fn=in_a_holder, device="cuda")
    found: list[Any] = []
    for _ in range(3):
        found.clear()
        for x, y, holder in loader:
            torch.cuda._sleep(LATE)
            assert not holder.tensor.is_pinned()
            assert holder.tensor.data_ptr() not in addresses
            mine = holder.tensor.to(CUDA, non_blocking=True)
            found.append((torch.minimum(x, mine), y * 1))
            del x, y, holder, mine
        assert_whole(found)
    assert "a device reads it where it is" in loader.explain()
    assert "not all of it" not in loader.explain()
    assert all(map(is_locked, addresses))
    copier_of(CUDA).forget_passed()
    del loader
    gc.collect()
    assert not any(map(is_locked, addresses))


@pytest.mark.skipif(REHEARSAL, reason="the fake device has no caching allocator")
def test_memory_does_not_grow_with_the_epochs() -> None:
    def epoch() -> int:
        for x, _ in DataLoader(table(), BATCH, device="cuda"):
            x.sum()
        return torch.cuda.memory_reserved()

    epoch()
    before = epoch()
    for _ in range(10):
        assert epoch() == before


@pytest.mark.skipif(REHEARSAL, reason="the late device is the only one")
def test_a_device_that_is_not_current() -> None:
    needs_two_devices()
    found = list(DataLoader(table(), BATCH, device="cuda:1"))
    assert all(x.device == y.device == torch.device("cuda:1") for x, y in found)
    assert_whole(found)
