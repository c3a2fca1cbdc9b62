"""Clipped gradients against torch.nn.utils."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import faststep.clip as ours
from compare import assert_same_tensors, outcome
from gradients import LAYOUTS, grads_of, params_with, twice

torchs = torch.nn.utils
INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Two roundings, of the coefficient and of the product, and torch's own rounded norm; the absolute
# tolerance is for subnormal fp16 elements.
ATOL = 1.2e-7
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("max_norm", [0.3, 1e6])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipped_gradients_are_torchs(layout: str, dtype: torch.dtype, max_norm: float) -> None:
    mine, their = twice([LAYOUTS[layout]().to(dtype), torch.randn(9).to(dtype)])
    before = [g.clone() for g in grads_of(mine)]
    norm = ours.clip_grad_norm_(mine, max_norm)
    expected = torchs.clip_grad_norm_(their, max_norm)
    torch.testing.assert_close(norm, expected, rtol=TOLERANCE[dtype], atol=0)
    for a, b in zip(grads_of(mine), grads_of(their), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=ATOL)
    if max_norm == 1e6:
        assert_same_tensors(grads_of(mine), before)


def test_gaps_between_elements_are_not_written() -> None:
    whole = torch.ones(8, 8)
    (param,) = params_with([whole[1:5, ::3]])
    ours.clip_grad_norm_(param, 0.1)
    ours.clip_grad_value_(param, 0.01)
    inside = torch.zeros(8, 8, dtype=torch.bool)
    inside[1:5, ::3] = True
    assert (whole[~inside] == 1).all()
    assert (whole[inside] == 0.01).all()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, 0.0, "inf", 3])
def test_every_norm_type_clips_as_in_torch(norm_type: Any) -> None:
    mine, their = twice([torch.randn(50), torch.zeros(4), torch.randn(3, 3)])
    norm = ours.clip_grad_norm_(mine, 0.7, norm_type)
    torch.testing.assert_close(norm, torchs.clip_grad_norm_(their, 0.7, norm_type))
    for a, b in zip(grads_of(mine), grads_of(their), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("max_norm", [-1.0, 0.0, NAN, INF, -INF, torch.tensor(0.5), "0.5"])
def test_odd_max_norms_do_what_they_do_in_torch(max_norm: Any) -> None:
    mine, their = twice([torch.tensor([3.0, -4.0]), torch.tensor([[1.0]])])
    norm = ours.clip_grad_norm_(mine, max_norm)
    assert_same_tensors([norm], [torchs.clip_grad_norm_(their, max_norm)])
    for a, b in zip(grads_of(mine), grads_of(their), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("max_norm", [1.0, INF])
def test_nonfinite_gradients_end_as_in_torch(bad: float, norm_type: float, max_norm: float) -> None:
    mine, their = twice([torch.tensor([1.0, bad, -2.0]), torch.tensor([5.0])])
    norm = ours.clip_grad_norm_(mine, max_norm, norm_type)
    assert_same_tensors([norm], [torchs.clip_grad_norm_(their, max_norm, norm_type)])
    assert_same_tensors(grads_of(mine), grads_of(their))


def test_gradients_are_written_only_where_the_coefficient_changes_them() -> None:
    (param,) = params_with([torch.tensor([3.0, 4.0])])
    ours.clip_grad_norm_(param, 5.1)
    ours.clip_grads_with_norm_(param, 5.1, torch.tensor(5.0))
    assert param.grad._version == 0
    ours.clip_grad_norm_(param, 4.9)
    assert param.grad._version == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda p: ours.clip_grad_norm_(p, 0.1),
        lambda p: ours.clip_grad_value_(p, 0.1),
        lambda p: ours.clip_grads_with_norm_(p, 0.1, torch.tensor(1.0)),
    ],
)
def test_autograd_catches_a_gradient_changed_under_it(change: Callable[[Tensor], Any]) -> None:
    (param,) = params_with([torch.ones(3)])
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * param.grad).sum()
    change(param)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_parameter_listed_twice_counts_twice_as_in_torch() -> None:
    mine, their = twice([torch.randn(30000), torch.randn(3)])
    norm = ours.clip_grad_norm_([*mine, mine[0]], 1.0)
    torch.testing.assert_close(norm, torchs.clip_grad_norm_([*their, their[0]], 1.0))
    for a, b in zip(grads_of(mine), grads_of(their), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    "total_norm",
    [
        torch.tensor(4.0),
        torch.tensor(4.0, dtype=torch.float64),
        torch.tensor(4.0, dtype=torch.bfloat16),
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.tensor(0.7, dtype=torch.float16),
        torch.tensor(0.0, dtype=torch.float16),
        torch.tensor(4),
        torch.tensor(-1.0),
        torch.tensor(-1e-6, dtype=torch.float64),
        torch.tensor(INF),
        torch.tensor(NAN),
        torch.tensor([4.0]),
        torch.tensor([4.0, 5.0]),
        torch.tensor(4.0, requires_grad=True),
        4.0,
    ],
    ids=str,
)
def test_clipping_with_a_given_norm(total_norm: Any) -> None:
    mine, their = twice([torch.tensor([1.0, INF, 0.25]), torch.tensor([[2.0]])])
    assert outcome(lambda: ours.clip_grads_with_norm_(mine, 0.5, total_norm)) == outcome(
        lambda: torchs.clip_grads_with_norm_(their, 0.5, total_norm)
    )
    for a, b in zip(grads_of(mine), grads_of(their), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("limit", [0.5, 0.0, 7, INF, -1.0, NAN, torch.tensor(0.5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_gradients_are_torchs(dtype: torch.dtype, limit: Any) -> None:
    grads = [make().to(dtype) for make in LAYOUTS.values()]
    if not limit >= 0:  # torch's function, which raises an error for a negated one
        grads = [grad.resolve_neg() for grad in grads]
    mine, their = twice([*grads, torch.tensor([NAN, INF, -INF, -0.0, 0.5], dtype=dtype)])
    ours.clip_grad_value_(mine, limit)
    torchs.clip_grad_value_(their, limit)
    assert_same_tensors(grads_of(mine), grads_of(their))
