"""The norms of faststep.clip against torch.nn.utils and against sums in fp64."""

import functools
import math
from functools import partial
from typing import Any

import pytest
import torch

import faststep.clip as ours
from compare import assert_same_tensors, outcome
from gradients import exact_norm, grads_of, params_with, twice

torchs = torch.nn.utils
INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NORM_TYPES = [2.0, 1.0, 3.0, 0.5, 0.0, INF, -INF, -1.0]


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_the_fp64_norm_in_torchs_dtype(dtype: torch.dtype, norm_type: float) -> None:
    tensors = [torch.randn(n).to(dtype) for n in (1, 5, 64, 20000)] + [torch.zeros(3, dtype=dtype)]
    if norm_type < 0:
        tensors.pop()
    norm = ours.get_total_norm(tensors, norm_type)
    assert norm.shape == ()
    assert norm.dtype == torchs.get_total_norm(tensors, norm_type).dtype == dtype
    exact = exact_norm(tensors, norm_type)
    if dtype in (torch.float32, torch.float64):
        assert float(norm) == pytest.approx(exact, rel=1e-6)
    else:
        assert norm == torch.tensor(exact).to(dtype)


def test_norm_of_a_large_tensor_is_within_1e6_of_fp64() -> None:
    tensor = torch.rand(1 << 23) + 0.5
    assert float(ours.get_total_norm(tensor)) == pytest.approx(exact_norm([tensor], 2.0), rel=1e-6)


def test_norm_does_not_depend_on_the_number_of_threads() -> None:
    tensors = [torch.randn(n) for n in (100003, 17, 65536, 40000)]
    norms = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        norms.add(float(ours.get_total_norm([t.double() for t in tensors])))
    assert len(norms) == 1


@pytest.mark.parametrize("size", [1e19, 3e38])
def test_squares_that_overflow_fp32_do_not_overflow_the_norm(size: float) -> None:
    (param,) = params_with([torch.full((1000,), size)])
    expected = 1000**0.5 * size
    norm = ours.clip_grad_norm_(param, 1.0)
    assert float(norm) == (pytest.approx(expected, rel=1e-6) if expected < 3.4e38 else INF)
    assert float(param.grad.norm()) == pytest.approx(1.0, rel=1e-5)


def test_an_fp16_norm_beyond_fp16_still_clips() -> None:
    (param,) = params_with([torch.full((1000,), 6e4, dtype=torch.float16)])
    assert ours.clip_grad_norm_(param, 1.0) == INF
    assert float(param.grad.float().norm()) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0])
@pytest.mark.parametrize("name", ["clip_grad_norm_", "get_total_norm"])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float16,),
        (torch.float32,),
        (torch.bfloat16,),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
)
def test_error_if_nonfinite_returns_finite_norms_only(
    dtypes: tuple[torch.dtype, ...], name: str, norm_type: float
) -> None:
    """The norm overflows the dtype that is returned, or would not in a wider one."""
    returned = functools.reduce(torch.promote_types, dtypes)
    for largest in {torch.finfo(dtype).max for dtype in dtypes}:
        params = params_with([torch.full((1000,), 0.9 * largest).to(d) for d in dtypes])
        exact = exact_norm(grads_of(params), norm_type)
        before = [grad.clone() for grad in grads_of(params)]
        given: list[Any] = [params, 1.0] if name == "clip_grad_norm_" else [grads_of(params)]
        call = partial(getattr(ours, name), *given, norm_type, error_if_nonfinite=True)
        if torch.tensor(exact, dtype=torch.float64).to(returned).isinf():
            with pytest.raises(RuntimeError, match=f"total norm of order {norm_type} .* is non-"):
                call()
            assert_same_tensors(grads_of(params), before)
        else:
            assert call().isfinite()


def test_zero_elements_add_nothing_to_a_maximum() -> None:
    (param, _) = params_with([torch.tensor([3.0, -4.0]), torch.ones(0)])
    assert ours.clip_grad_norm_([param, _], 1.0, INF) == 4.0
    torch.testing.assert_close(param.grad, torch.tensor([0.75, -1.0]))


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.float32, torch.float16),
    ],
)
def test_mixed_dtypes_promote_as_in_torch(dtypes: tuple[torch.dtype, ...]) -> None:
    mine, their = twice([torch.randn(100).to(dtype) for dtype in dtypes])
    exact = exact_norm(grads_of(mine), 2.0)
    norm = ours.clip_grad_norm_(mine, 0.5)
    assert norm.dtype == torchs.clip_grad_norm_(their, 0.5).dtype
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    for a, b in zip(grads_of(mine), grads_of(their), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=0)


@pytest.mark.parametrize("norm_type", [2.0, INF, 3])
@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("name", ["clip_grad_norm_", "get_total_norm"])
def test_error_if_nonfinite(name: str, bad: float, norm_type: float) -> None:
    mine, their = twice([torch.tensor([1.0, bad])])
    results = []
    for module, params in ((ours, mine), (torchs, their)):
        arguments: list[Any] = [params, 1.0] if name == "clip_grad_norm_" else [grads_of(params)]
        results.append(
            outcome(partial(getattr(module, name), *arguments, norm_type, error_if_nonfinite=True))
        )
    assert results[0] == results[1]
    assert results[0][1] is RuntimeError
    assert_same_tensors(grads_of(mine), [torch.tensor([1.0, bad])])


def test_results_carry_no_graph_and_ignore_the_default_device() -> None:
    grad = torch.ones(3, requires_grad=True) * 2.0
    (param,) = params_with([grad])
    with torch.device("meta"):
        norm = ours.clip_grad_norm_(param, 1.0)
    assert not norm.requires_grad
    assert norm.device == torch.device("cpu")
    assert ours.get_total_norm(grad).grad_fn is None
