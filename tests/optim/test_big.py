"""More than 2^31 elements, and offsets beyond 2^32, in a few megabytes of real memory.

A large mapping repeats one block of physical memory: every block but the last is the same 64 MiB,
so a tensor of 4 GiB can be read and written for the price of two blocks.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

import faststep

from .common import parameters, same_bits, set_gradients
from .declarations import ALL, SGD, Declaration

BLOCK = 64 << 20
COUNT = 2**31 + 1000

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or sys.maxsize < 2**32,
    reason="needs memfd_create and a 64-bit address space",
)


class Repeated:
    """An address range of at least `size` bytes whose blocks, but for the last, are one block."""

    def __init__(self, size: int) -> None:
        self.blocks = -(-size // BLOCK)
        self.size = self.blocks * BLOCK
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            *[ctypes.c_int] * 3,
            ctypes.c_long,
        ]
        self.libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.file = os.memfd_create("repeated")
        os.ftruncate(self.file, 2 * BLOCK)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address = self.map(None, self.size, 0, private, -1, 0)
        for i in range(self.blocks):
            place = BLOCK if i == self.blocks - 1 else 0
            shared = mmap.MAP_SHARED | 0x10 | 0x8000  # MAP_FIXED, MAP_POPULATE
            self.map(self.address + i * BLOCK, BLOCK, 3, shared, self.file, place)

    def map(self, *arguments: int | None) -> int:
        address: int = self.libc.mmap(*arguments)
        if address in (None, ctypes.c_void_p(-1).value):
            pytest.skip(f"mmap: {os.strerror(ctypes.get_errno())}")
        return address

    def tensor(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = (ctypes.c_char * self.size).from_address(self.address)
        return torch.frombuffer(buffer, dtype=dtype, count=count)

    def close(self) -> None:
        self.libc.munmap(self.address, self.size)
        os.close(self.file)


@pytest.fixture
def large() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two bf16 tensors of COUNT zeros with a few values beyond element 2^31."""
    maps = [Repeated(2 * COUNT) for _ in range(2)]
    tensors = [m.tensor(COUNT, torch.bfloat16) for m in maps]
    for t, values in zip(tensors, ([1.0, 2.0, 3.0], [0.5, -4.0, 8.0]), strict=True):
        t[2**31], t[2**31 + 1], t[-1] = values
    yield tensors[0], tensors[1]
    del tensors, t
    for m in maps:
        m.close()


def test_more_than_2_to_the_31_elements(large: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Norms, an SGD step, clamping and unscaling reach the last element and nothing else."""
    value, gradient = large
    p = Parameter(value)
    p.grad = gradient
    norm = faststep.get_total_norm([gradient])
    exact = (0.25 + 16.0 + 64.0) ** 0.5
    assert norm.item() == pytest.approx(exact, rel=4e-3), "a bf16 tensor, as in torch"
    SGD.ours([p], lr=0.5).step()
    assert [p[2**31].item(), p[2**31 + 1].item(), p[-1].item()] == [0.75, 4.0, -1.0]
    assert p[: BLOCK // 2].count_nonzero() == 0
    assert p[-BLOCK // 4 :].count_nonzero() == 3
    faststep.clip_grad_value_([p], 3.0)
    _, found, _ = faststep._C.unscale_grads([p], 0.5, False)
    assert not found
    assert [gradient[2**31].item(), gradient[2**31 + 1].item(), gradient[-1].item()] == [
        0.25, -1.5, 1.5
    ]  # fmt: skip
    gradient[-1] = torch.inf
    assert faststep._C.unscale_grads([p], 1.0, False)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
def test_offsets_beyond_2_to_the_32(
    declaration: Declaration, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A small parameter spread over 16 GiB of a sparse file: 64-bit strides and offsets."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(16 << 30)
    size = (16 << 30) // dtype.itemsize
    whole = torch.from_file(str(path), shared=True, size=size, dtype=dtype)
    start = parameters((2, 3), dtype=dtype)[0].detach()
    stride = (2**31 + 9, 2**29 + 5)
    spread = Parameter(whole.as_strided((2, 3), stride, 11).copy_(start))
    dense = Parameter(start.clone())
    for p in (spread, dense):
        optimizer = declaration.ours([p], **declaration.kwargs)
        for step in range(2):
            set_gradients([p], step)
            optimizer.step()
    assert spread.stride() == stride
    assert same_bits(spread, dense)
