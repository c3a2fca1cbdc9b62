"""Batches of worker processes for a late device: copied from blocks that are page-locked."""

import gc
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from faststep.data import DataLoader
from faststep.data.deliver import copies
from faststep.data.workers import arena as arenas

from . import fake, late

ROWS, BATCH, WIDTH = 24, 2, 3000
STEPS = ROWS // BATCH


class Wide(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.full((WIDTH,), float(index)), index

    def __len__(self) -> int:
        return ROWS


def loader_of(**options: Any) -> DataLoader[Any]:
    options = {"num_workers": 1, "device": "cuda", **options}
    return DataLoader(Wide(), BATCH, **options)


def arena_of(loader: DataLoader[Any]) -> arenas.KeyedArena:
    assert loader._faststep.workers is not None
    latest = loader._faststep.workers._latest
    assert latest is not None
    return latest


def assert_whole(found: list[list[torch.Tensor]]) -> None:
    rows = torch.arange(ROWS)
    assert torch.equal(torch.cat([labels for _, labels in found]), rows)
    assert torch.equal(torch.cat([x for x, _ in found]), rows[:, None].expand(-1, WIDTH).float())


@pytest.mark.parametrize("ahead", [0, 2, 20])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_the_device_reads_the_blocks(device: late.Late, ahead: int, pin_memory: bool) -> None:
    """No batch is copied on the host, and no block is filled again before its copy has passed."""
    loader = loader_of(prefetch_to_device=ahead, pin_memory=pin_memory)
    calls = device.machine.calls
    before = calls("cuMemHostAlloc"), calls("cuEventSynchronize"), calls("cuMemHostRegister_v2")
    found = []
    for _ in range(3):
        iterator = iter(loader)
        assert not hasattr(iterator._batches, "_pin_memory_thread")
        for batch in iterator:
            assert all(tensor.is_cuda for tensor in batch)
            found.append([device.read(tensor) for tensor in batch])
            del batch
    assert (calls("cuMemHostAlloc"), calls("cuEventSynchronize")) == before[:2]
    # all copies were late: each batch of three epochs had blocks of its own
    assert arena_of(loader).memory.counts()["held"] == 2 * 3 * STEPS
    locked = arena_of(loader).memory.counts()["locked"]
    assert locked == 2 * 3 * STEPS
    assert calls("cuMemHostRegister_v2") - before[2] == locked + 1  # and a trial
    assert device.living().registered == locked
    assert "page-locked" in loader.explain()
    device.machine.synchronize()
    for epoch in range(3):
        assert_whole(found[epoch * STEPS : (epoch + 1) * STEPS])
    del loader, iterator
    copies.copier_of(torch.device("cuda")).forget_passed()
    gc.collect()
    assert device.living().registered == 0


def test_blocks_are_locked_once(device: late.Late) -> None:
    device.machine.lag(0)
    loader = loader_of(num_workers=2)
    locks = device.machine.calls("cuMemHostRegister_v2")
    for _ in range(4):
        assert_whole([[fake.plain(tensor) for tensor in batch] for batch in loader])
    assert device.machine.calls("cuMemHostRegister_v2") - locks <= 2 * 9 + 1


class Holder:
    """What only its user knows the inside of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def mixed(samples: Any) -> Any:
    x, labels = default_collate(samples)
    return {"x": x, "holder": Holder(x), "array": numpy.full(9000, int(labels[0]))}


def test_what_a_user_gets_to_see_is_not_locked(device: late.Late) -> None:
    """A copy that the user makes of it is over when it returns, as of any memory of torch's."""
    sources = []
    loader = DataLoader(Wide(), BATCH, num_workers=1, collate_fn=mixed, device="cuda")
    for batch in loader:
        held, array = batch["holder"].tensor, torch.from_numpy(batch["array"])
        assert not held.is_cuda
        assert not held.is_pinned()
        assert not array.is_pinned()
        copier = copies.copier_of(torch.device("cuda"))
        sources = [tensor for copy in copier._pending for tensor in copy.sources]
        assert all(source.is_pinned() for source in sources)
        assert held.data_ptr() not in [source.data_ptr() for source in sources]
        assert any(torch.equal(held, source) for source in sources)
    del sources


def test_without_a_driver_that_locks_the_batches_are_copied(device: late.Late) -> None:
    device.machine.fail("cuMemHostRegister_v2", 1, 2)
    loader = loader_of()
    pinned = device.machine.calls("cuMemHostAlloc")
    found = [[device.read(tensor) for tensor in batch] for batch in loader]
    assert device.machine.calls("cuMemHostAlloc") - pinned == 2 * STEPS
    why = "CUDA out of memory. cuMemHostRegister_v2 on CUDA device 0"
    assert f"not all of it is page-locked: {why}" in loader.explain()
    device.machine.synchronize()
    assert_whole(found)


def test_with_pin_memory_torchs_thread_copies_what_cannot_be_locked(
    device: late.Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    device.machine.fail("cuMemHostRegister_v2", 1, 2)
    iterator = iter(loader_of(pin_memory=True))
    assert iterator._batches._pin_memory_thread.is_alive()
    found = [[device.read(tensor) for tensor in batch] for batch in iterator]
    device.machine.synchronize()
    assert_whole(found)


def test_a_limit_of_locked_memory(device: late.Late) -> None:
    """What was locked before is used on; the rest is copied."""
    device.machine.fail("cuMemHostRegister_v2", 5, 2)
    loader = loader_of(num_workers=2)
    found = [[device.read(tensor) for tensor in batch] for batch in loader]
    assert arena_of(loader).memory.counts()["locked"] == 3
    assert device.machine.calls("cuMemHostAlloc") > 0
    assert "a device reads it where it is" in loader.explain()
    assert "not all of it is page-locked" in loader.explain()
    device.machine.synchronize()
    assert_whole(found)


def test_an_arena_that_goes_before_its_copies(device: late.Late) -> None:
    loader = loader_of()
    found = [[device.read(tensor) for tensor in batch] for batch in loader]
    del loader
    gc.collect()
    assert device.living().registered == 2 * STEPS
    device.machine.synchronize()
    assert_whole(found)
