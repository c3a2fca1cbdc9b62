"""Batches of the loader on a CUDA device: copied ahead, and never a wait on the host.

In a rehearsal copies are done at once; tests/device/test_prefetch.py has the late ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from faststep.data import DataLoader

from .common import CUDA, REHEARSAL, needs_two_devices, no_synchronization

ROWS, BATCH, WIDTH = 60, 4, 300 if REHEARSAL else 30_000
LATE = 20_000_000  # clock cycles: some 10 ms


@pytest.fixture(autouse=True)
def _copies(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if REHEARSAL:
        from device import fake, late
        from faststep.data import copies

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


DATASETS = {"arrays": table, "torch": Samples}


def assert_whole(found: list[Any]) -> None:
    torch.cuda.synchronize()
    assert torch.equal(torch.cat([x.cpu() for x, _ in found]), rows())
    assert torch.equal(torch.cat([y.cpu() for _, y in found]), torch.arange(ROWS))


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("way", DATASETS)
def test_a_slow_consumer(way: str, ahead: int) -> None:
    """Each batch is used late and dropped at once, so that all memory is used again."""
    loader = DataLoader(DATASETS[way](), BATCH, device="cuda", prefetch_to_device=ahead)
    for _ in range(3):
        found = []
        for x, y in loader:
            assert x.device == y.device == CUDA
            torch.cuda._sleep(LATE)
            found.append((x * 1.0, y * 1))
            del x, y
        assert_whole(found)


@pytest.mark.parametrize("way", DATASETS)
def test_the_host_never_waits(way: str) -> None:
    loader = DataLoader(DATASETS[way](), BATCH, device="cuda")
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


@pytest.mark.parametrize("way", DATASETS)
def test_breaking_off(way: str) -> None:
    """Memory that a copy will still write to is nobody else's."""
    loader = DataLoader(DATASETS[way](), BATCH, device="cuda", prefetch_to_device=3)
    for _ in range(3):
        torch.cuda._sleep(LATE)  # the copies wait for it
        for _ in loader:
            break
        mine = [torch.full((BATCH, WIDTH), 7.0, device=CUDA) for _ in range(5)]
        torch.cuda.synchronize()
        assert all(bool((tensor == 7.0).all()) for tensor in mine)
    assert_whole(list(loader))


def test_pinned_batches_may_be_copied_and_dropped() -> None:
    """A script's own copies: torch knows the memory, and gives it to nobody before they passed."""
    loader = DataLoader(table(), BATCH, pin_memory=True)
    for _ in range(3):
        found = []
        for x, y in loader:
            assert x.is_pinned()
            assert y.is_pinned()
            torch.cuda._sleep(LATE)
            found.append((x.to(CUDA, non_blocking=True), y.to(CUDA, non_blocking=True)))
            del x, y
        assert_whole(found)


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
