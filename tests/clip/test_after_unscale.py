"""clip_grad_norm_ after unscale_: one pass over large gradients, whatever was done in between."""

import math
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import faststep
from compare import assert_same_tensors
from faststep import _C
from gradients import grads_of

SIZES = ((700, 1000), (1 << 19,), (33_000,), (5, 7))  # 43, 32, 3 and 1 chunks
MAX_NORM = 1.0


def scaler() -> faststep.amp.GradScaler:
    made = faststep.amp.GradScaler("cpu", init_scale=1024.0)
    made.scale(torch.ones(()))
    return made


def unscaled(
    dtype: torch.dtype = torch.float32, order: Sequence[int] = range(len(SIZES))
) -> list[Parameter]:
    """Parameters whose gradients, of a norm of some 1100, unscale_ has just divided."""
    torch.manual_seed(0)
    params = [Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES]
    for param in params:
        param.grad = torch.randn(param.shape, dtype=dtype) * 1024
    optimizer = faststep.optim.SGD([params[i] for i in order], lr=1.0)
    scaler().unscale_(optimizer)
    return params


def expected(params: Sequence[Tensor], max_norm: float = MAX_NORM) -> tuple[Tensor, list[Tensor]]:
    """Norm and gradients as a pass that measures and one that scales have them."""
    copies = [grad.clone() for grad in grads_of(params)]
    norm = _C.norm(copies, 2.0)[0]
    if (coefficient := max_norm / (norm + 1e-6)) < 1.0:
        _C.scale(copies, coefficient)
    return torch.tensor(norm, dtype=copies[0].dtype), copies


def write_behind(grad: Tensor) -> None:
    """As no version counter tells."""
    before = grad._version
    grad.view(-1).data[:100] += 3.0
    assert grad._version == before


def roundings(result: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """How many roundings of fp32 each tensor is away, where most."""
    eps = torch.finfo(torch.float32).eps
    return [
        float(((a.double() - b.double()).abs() / b.double().abs()).max()) / (eps / 2)
        for a, b in zip(result, exact, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=["in order", "other groups"])
@pytest.mark.parametrize("max_norm", [MAX_NORM, 1e-9, 0.0, 1e6])
def test_norm_and_bits_are_those_of_clipping_alone(
    dtype: torch.dtype, order: tuple[int, ...], max_norm: float
) -> None:
    params = unscaled(dtype, order)
    exact = expected(params, max_norm)
    versions = [grad._version for grad in grads_of(params)]
    norm = faststep.clip_grad_norm_(params, max_norm)
    assert_same_tensors([norm, *grads_of(params)], [exact[0], *exact[1]])
    moved = [grad._version - v for grad, v in zip(grads_of(params), versions, strict=True)]
    assert moved == [int(max_norm < 1e6)] * len(params)


def test_a_write_that_no_counter_tells_of_is_clipped_by_the_true_norm() -> None:
    params = unscaled()
    write_behind(grads_of(params)[2])
    norm, exact = expected(params)
    torch.testing.assert_close(faststep.clip_grad_norm_(params, MAX_NORM), norm, rtol=0, atol=0)
    away = roundings(grads_of(params), exact)
    # What was not written was scaled by the norm that was expected, then by the difference: this
    # is what shows that there was one pass.
    assert 0.0 < away[0] <= 4.0
    assert 0.0 < away[1] <= 4.0
    changed = grads_of(params)[2]
    torch.testing.assert_close(changed[:16384], exact[2][:16384], rtol=0, atol=0)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=["in order", "other groups"])
def test_a_part_of_the_gradients_and_another_order_are_known_too(order: tuple[int, ...]) -> None:
    params = unscaled(order=order)[1::-1]
    write_behind(grads_of(params)[0])
    norm, exact = expected(params)
    torch.testing.assert_close(faststep.clip_grad_norm_(params, MAX_NORM), norm, rtol=0, atol=0)
    assert 0.0 < roundings(grads_of(params), exact)[1] <= 4.0


def test_the_correction_has_the_same_bits_for_every_number_of_threads() -> None:
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            params = unscaled()
            write_behind(grads_of(params)[0])
            results.append([faststep.clip_grad_norm_(params, MAX_NORM), *grads_of(params)])
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert_same_tensors(result, results[0])


def add_noise(params: list[Parameter]) -> None:
    for grad in grads_of(params):
        grad.add_(0.5)


def replace_one(params: list[Parameter]) -> None:
    params[1].grad = grads_of(params)[1] * 2.0


def write_all_behind(params: list[Parameter]) -> None:
    for grad in grads_of(params):
        grad.data.mul_(0.3)


def clip_twice(params: list[Parameter]) -> None:
    faststep.clip_grad_norm_(params, 5.0)


def drop_one(params: list[Parameter]) -> None:
    params[0].grad = None


@pytest.mark.parametrize("change", [add_noise, replace_one, write_all_behind, clip_twice, drop_one])
def test_other_changes_leave_the_bits_of_clipping_alone(
    change: Callable[[list[Parameter]], None],
) -> None:
    params = unscaled()
    change(params)
    norm, exact = expected([p for p in params if p.grad is not None])
    result = faststep.clip_grad_norm_(params, MAX_NORM)
    assert_same_tensors(
        [result, *grads_of([p for p in params if p.grad is not None])], [norm, *exact]
    )


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_became_nonfinite_ends_as_in_torch(bad: float) -> None:
    params = unscaled()
    grads_of(params)[0].data[3, 4] = bad
    copies = [Parameter(p.detach().clone()) for p in params]
    for copy, grad in zip(copies, grads_of(params), strict=True):
        copy.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(copies, MAX_NORM)
    assert_same_tensors([faststep.clip_grad_norm_(params, MAX_NORM)], [norm])
    for mine, its in zip(grads_of(params), grads_of(copies), strict=True):
        assert_same_tensors([mine.abs()], [its.abs()])  # 0 may be -0


def test_an_error_for_a_norm_that_became_nonfinite_comes_before_any_write() -> None:
    params = unscaled()
    grads_of(params)[0].data[3, 4] = math.inf
    before = [grad.clone() for grad in grads_of(params)]
    with pytest.raises(RuntimeError, match="non-finite"):
        faststep.clip_grad_norm_(params, MAX_NORM, error_if_nonfinite=True)
    assert_same_tensors(grads_of(params), before)


def test_other_norms_are_measured() -> None:
    params = unscaled()
    exact = [grad.clone() for grad in grads_of(params)]
    norm = faststep.clip_grad_norm_(params, MAX_NORM, math.inf)
    assert float(norm) == max(float(grad.abs().max()) for grad in exact)


def test_gradients_without_a_version_are_unscaled_and_clipped() -> None:
    """Those made in inference mode; after others that have one, too."""
    params = unscaled()
    with torch.inference_mode():
        made = [torch.randn(param.shape) * 1024 for param in params]
    for param, grad in zip(params, made, strict=True):
        param.grad = grad
    _, exact = expected(params)
    faststep.clip_grad_norm_(params, MAX_NORM)
    assert_same_tensors(grads_of(params), exact)
    scaler().unscale_(faststep.optim.SGD(params, lr=1.0))
    divided = [grad / 1024 for grad in exact]
    assert_same_tensors(grads_of(params), divided)
    norm, exact = expected(params, MAX_NORM / 4096)
    result = faststep.clip_grad_norm_(params, MAX_NORM / 4096)
    assert_same_tensors([result, *grads_of(params)], [norm, *exact])


def test_a_visible_write_beside_an_empty_gradient_leaves_the_bits_of_clipping_alone() -> None:
    """Torch is asked for the transposed and the empty one only, of small gradients."""
    params = [Parameter(torch.zeros(size)) for size in ((1200, 1000), (0,), (1 << 19,))]
    grads = [torch.randn(1000, 1200).t(), torch.zeros(0), torch.randn(1 << 19)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad * 1024
    faststep.clip_grad_norm_(params[2:], math.inf)  # what it looks like is known from here on
    scaler().unscale_(faststep.optim.SGD(params, lr=1.0))
    grads_of(params)[2].add_(0.5)
    norm, exact = expected(params)
    result = faststep.clip_grad_norm_(params, MAX_NORM)
    assert_same_tensors([result, *grads_of(params)], [norm, *exact])


def test_nothing_keeps_gradients_alive() -> None:
    params = unscaled()
    seen = [weakref.ref(grad) for grad in grads_of(params)]
    for param in params:
        param.grad = None
    assert not any(ref() for ref in seen)
