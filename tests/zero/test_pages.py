"""Memory of buckets, which goes back to the system."""

import resource
from pathlib import Path

import pytest
import torch

from faststep.zero.layout.pages import BufferPool, Pages

CPU = torch.device("cpu")
MIB = 2**20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [0, 1, MIB // 2 - 1, MIB // 2, MIB + 3])
def test_zeros(count: int, dtype: torch.dtype) -> None:
    memory = Pages(count, dtype, CPU)
    pages = memory.tensor
    assert (pages.shape, pages.dtype, pages.device) == ((count,), dtype, CPU)
    assert not pages.any()
    assert pages.data_ptr() % 64 == 0
    pages.fill_(1.0)
    assert pages.sum(dtype=torch.float64) == count
    memory.forget()
    assert not pages.any()


def test_they_go_back_with_the_last_view() -> None:
    pages = Pages(32 * MIB, torch.float32, CPU).tensor
    pages.fill_(1.0)
    view = pages[5:7]
    full = resident()
    del pages
    assert view.tolist() == [1.0, 1.0]
    assert full - resident() < 16 * MIB
    del view
    assert full - resident() > 120 * MIB


def test_forgotten_values_take_no_memory() -> None:
    pages = Pages(32 * MIB, torch.float32, CPU)
    view = pages.tensor[7:]
    view.fill_(1.0)
    full = resident()
    pages.forget()
    assert full - resident() > 120 * MIB
    assert view[-1] == 0.0
    view.fill_(2.0)
    assert pages.tensor[[0, 7, -1]].tolist() == [0.0, 2.0, 2.0]


def test_a_shelf_gives_out_a_block_again() -> None:
    shelf = BufferPool(4 * MIB)
    first, second = shelf.take(), shelf.take()
    assert first.data_ptr() != second.data_ptr()
    assert (first.dtype, first.numel()) == (torch.uint8, 4 * MIB)
    shelf.give_back(first)
    assert shelf.take() is first
    shelf.give_back(first)
    shelf.give_back(second)
    shelf.clear()
    assert shelf.take() is not first


def test_a_cleared_shelf_takes_no_memory() -> None:
    shelf = BufferPool(128 * MIB)
    shelf.give_back(shelf.take().fill_(1))
    full = resident()
    shelf.clear()
    assert full - resident() > 120 * MIB
