"""Sums of squares per chunk, and their fold, without ranks."""

import pytest
import torch

from faststep import _C
from faststep.zero.layout.cuts import CHUNK, chunks_in

SIZES = [1, 0, CHUNK, CHUNK + 1, 70_000, 300]


@pytest.mark.parametrize("inv_scale", [1.0, 1.0 / 1024, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_folded_chunks_have_the_bits_of_one_measurement(
    dtype: torch.dtype, inv_scale: float
) -> None:
    tensors = [torch.randn(size).to(dtype) for size in SIZES * 60]
    sums = torch.full((sum(chunks_in(t.numel()) for t in tensors),), -1.0, dtype=torch.float64)
    assert _C.chunk_squares(tensors, inv_scale, sums) is False
    assert _C.fold_squares(sums) == _C.measure(tensors, inv_scale)[0]
    # Pieces that begin at chunks, measured apart, have the same sums.
    part = torch.empty(chunks_in(70_000) - 2, dtype=torch.float64)
    _C.chunk_squares([tensors[4][2 * CHUNK :]], inv_scale, part)
    first = sum(chunks_in(t.numel()) for t in tensors[:4])
    assert torch.equal(part, sums[first + 2 : first + 2 + len(part)])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_infinity_is_found_and_a_large_sum_is_not_one(bad: float) -> None:
    values = torch.ones(40_000, dtype=torch.float64)
    sums = torch.empty(3, dtype=torch.float64)
    values[20_000] = 1e200
    assert _C.chunk_squares([values], 1.0, sums) is False
    assert sums.isinf().tolist() == [False, True, False]
    values[39_999] = bad
    assert _C.chunk_squares([values], 1.0, sums) is True


def test_sums_that_do_not_fit() -> None:
    tensors = [torch.ones(CHUNK + 1)]
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=f"expected room for 2 sums, not for {count}"):
            _C.chunk_squares(tensors, 1.0, torch.empty(count, dtype=torch.float64))
    for sums in (torch.empty(2), torch.empty(4, dtype=torch.float64)[::2]):
        with pytest.raises(TypeError, match="sums must be a contiguous float64 tensor"):
            _C.chunk_squares(tensors, 1.0, sums)
        with pytest.raises(TypeError, match="sums must be a contiguous float64 tensor"):
            _C.fold_squares(sums)
