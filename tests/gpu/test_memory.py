"""Tensors of more than 2^31 elements, and device memory that comes back."""

import gc

import pytest
import torch
from torch import Tensor

import faststep
from faststep import _C

from .common import CUDA, REHEARSAL, place, values

PIECE = 1_000_003  # odd, so that a wrong address does not meet the same values
BYTES = 2**31 * 8


def elements() -> int:
    if REHEARSAL:
        return 70_003
    free = torch.cuda.mem_get_info()[0]
    if free < BYTES * 1.2:
        pytest.skip(f"needs {BYTES * 1.2 / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free")
    return 2**31 + 12_345


def repeated(piece: Tensor, count: int) -> Tensor:
    """The piece again and again."""
    whole = torch.empty(count, dtype=piece.dtype, device=CUDA)
    for begin in range(0, count, piece.numel()):
        part = whole[begin : begin + piece.numel()]
        part.copy_(piece[: part.numel()])
    return whole


def assert_repeats(whole: Tensor, piece: Tensor) -> None:
    for begin in range(0, whole.numel(), piece.numel()):
        part = whole[begin : begin + piece.numel()]
        assert torch.equal(part, piece[: part.numel()]), f"from element {begin}"


def test_more_elements_than_an_int_holds() -> None:
    count = elements()
    piece = min(PIECE, count // 3)
    value = values((piece,), 0, torch.bfloat16)
    grad = torch.randint(-8, 9, (piece,)).to(torch.bfloat16)  # whose squares have an exact sum
    small = torch.nn.Parameter(value.clone())
    small.grad = grad.clone()
    faststep.optim.SGD([small], lr=0.1, weight_decay=0.1).step()
    large = torch.nn.Parameter(repeated(place(value, CUDA), count))
    large.grad = repeated(place(grad, CUDA), count)
    optimizer = faststep.optim.SGD([large], lr=0.1, weight_decay=0.1, max_grad_norm=1e30)
    optimizer.step()
    assert_repeats(large.detach(), place(small.detach(), CUDA))
    squares = grad.double().square()
    total = float(squares.sum()) * (count // piece) + float(squares[: count % piece].sum())
    norm = torch.empty((), dtype=torch.float64, device=CUDA)
    _C.device_norm([large.grad], 2.0, norm)
    assert float(norm) == total**0.5
    assert float(optimizer.last_grad_norm) == float(torch.tensor(total**0.5))
    faststep.clip_grad_value_([large], 3.0)
    assert_repeats(large.grad, place(grad.clamp(-3.0, 3.0), CUDA))


@pytest.mark.skipif(REHEARSAL, reason="the fake device has no memory of its own")
def test_memory_comes_back() -> None:
    def once() -> None:
        params = [torch.nn.Parameter(torch.ones(1000, device=CUDA)) for _ in range(2000)]
        for p in params:
            p.grad = torch.ones_like(p)
        faststep.optim.AdamW(params, max_grad_norm=1.0).step()

    def free() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    once()
    before = free()
    for _ in range(20):
        once()
    assert free() >= before - (4 << 20)
