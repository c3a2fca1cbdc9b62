"""Datasets in memory that torch shares between processes, maps, or does not own."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch.utils.data import TensorDataset

from faststep.data import DataLoader

ROWS, WIDTH, BATCH = 12_000, 64, 500


def rows() -> torch.Tensor:
    return torch.arange(ROWS).int().view(-1, 1).repeat(1, WIDTH)


def send(x: torch.Tensor) -> None:
    """What torch does with a tensor that it sends to a process."""
    ForkingPickler(io.BytesIO()).dump(x)


def epoch_with_a_sent_tensor(loader: DataLoader, x: torch.Tensor) -> list[torch.Tensor]:
    batches = []
    for number, (batch,) in enumerate(loader):
        batches.append(batch)
        if number == 2:
            send(x)
            torch.full((ROWS, WIDTH), -7)
    return batches


def names() -> set[str]:
    """The files in memory that this process has made."""
    return {name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name}


@pytest.fixture
def file_system() -> Iterator[None]:
    """What is sent and received by nobody keeps its name until the process ends, or this does."""
    before = torch.multiprocessing.get_sharing_strategy()
    there = names()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)
    for name in names() - there:
        os.unlink(f"/dev/shm/{name}")


def shared() -> torch.Tensor:
    return rows().share_memory_()


class TestOfAnotherStrategy:
    """torch moves shared memory when it is to be sent in another way than it is shared in."""

    def check(self, x: torch.Tensor) -> None:
        ours = DataLoader(TensorDataset(x), BATCH)
        assert ours.path == "torch"
        assert "tensors[0]: its memory is shared" in ours.explain()
        address = x.data_ptr()
        assert torch.equal(torch.cat(epoch_with_a_sent_tensor(ours, x)), rows())
        assert x.data_ptr() != address

    def test_shared_before(self, request: pytest.FixtureRequest) -> None:
        x = shared()
        request.getfixturevalue("file_system")
        self.check(x)

    @pytest.mark.usefixtures("file_system")
    def test_a_mapped_file(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.bin"
        rows().numpy().tofile(path)
        x = torch.from_file(str(path), size=ROWS * WIDTH, dtype=torch.int32).view(ROWS, WIDTH)
        self.check(x)

    def test_shared_by_name(self, request: pytest.FixtureRequest) -> None:
        request.getfixturevalue("file_system")
        x = shared()
        torch.multiprocessing.set_sharing_strategy("file_descriptor")
        self.check(x)


class TestOfTheSameStrategy:
    def check(self, x: torch.Tensor) -> None:
        ours = DataLoader(TensorDataset(x), BATCH)
        assert ours.path == "arrays"
        address = x.data_ptr()
        assert torch.equal(torch.cat(epoch_with_a_sent_tensor(ours, x)), rows())
        assert x.data_ptr() == address

    def test_by_descriptor(self) -> None:
        self.check(shared())

    @pytest.mark.usefixtures("file_system")
    def test_by_name(self) -> None:
        self.check(shared())

    def test_of_a_file_that_torch_load_maps(self, tmp_path: Path) -> None:
        torch.save(rows(), tmp_path / "rows.pt")
        x = torch.load(tmp_path / "rows.pt", mmap=True)
        ours = DataLoader(TensorDataset(x), BATCH)
        assert ours.path == "arrays"
        assert torch.equal(torch.cat(epoch_with_a_sent_tensor(ours, x)), rows())


class TestMemoryWithoutAnOwner:
    """As extensions make it with torch::from_blob: nobody frees it when the storage moves."""

    @pytest.mark.parametrize("workers", [0, 2])
    def test_moves(self, workers: int) -> None:
        memory = rows()
        storage = torch._C._construct_storage_from_data_pointer(
            memory.data_ptr(), torch.device("cpu"), memory.nbytes
        )
        x = torch.empty(0, dtype=torch.int32).set_(storage, 0, (ROWS, WIDTH), (WIDTH, 1))
        ours = DataLoader(
            TensorDataset(x), BATCH, num_workers=workers, persistent_workers=workers > 0
        )
        assert ours.path == "arrays"
        assert torch.equal(torch.cat([batch for (batch,) in ours]), rows())
        x.share_memory_()
        assert x.data_ptr() != memory.data_ptr()
        memory.fill_(-7)
        assert torch.equal(torch.cat([batch for (batch,) in ours]), rows())
