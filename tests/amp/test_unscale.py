"""unscale_ and the check for overflows against torch's."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from compare import assert_same_tensors, outcome
from faststep.amp import GradScaler
from gradients import LAYOUTS, grads_of, params_with, twice
from scalers import Doubtful, make_scaler

INF, NAN = math.inf, math.nan
TORCHS = torch.amp.GradScaler
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def optimizer_over(params: list[Parameter]) -> torch.optim.Optimizer:
    """Two groups, as the passes go over all of them."""
    groups = [params[:1], params[1:]]
    return torch.optim.SGD([{"params": group} for group in groups if group], lr=0.1)


def found_inf(scaler: Any, optimizer: torch.optim.Optimizer) -> dict[torch.device, float]:
    return {d: t.item() for d, t in scaler._found_inf_per_device(optimizer).items()}


def both_ways(
    mine: list[Parameter], their: list[Parameter], method: str, scale: float
) -> list[dict[torch.device, float]]:
    found = []
    for cls, params in ((GradScaler, mine), (TORCHS, their)):
        scaler, optimizer = make_scaler(cls, scale), optimizer_over(params)
        getattr(scaler, method)(optimizer)
        found.append(found_inf(scaler, optimizer))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [8.0, 3.0, 1.0, 0.1])
def test_unscaled_gradients_are_torchs(layout: str, dtype: torch.dtype, scale: float) -> None:
    mine, their = twice([LAYOUTS[layout]().to(dtype), torch.randn(33).to(dtype)])
    found = both_ways(mine, their, "unscale_", scale)
    assert found == [{CPU: 0.0}] * 2
    for a, b in zip(grads_of(mine), grads_of(their), strict=True):
        assert a.stride() == b.stride()
        # In fp64 torch multiplies by the float32 inverse too: the same number, the same product.
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_all_dtypes_of_all_groups_in_one_call() -> None:
    grads = [torch.randn(5).to(dtype) for dtype in (*DTYPES, *DTYPES)]
    mine, their = twice(grads)
    assert both_ways(mine, their, "unscale_", 3.0) == [{CPU: 0.0}] * 2
    assert_same_tensors(grads_of(mine), grads_of(their))


@pytest.mark.parametrize("method", ["unscale_", "_check_inf_per_device"])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 7, 4099])
def test_an_overflow_anywhere_is_found(
    method: str, bad: float, dtype: torch.dtype, place: int
) -> None:
    grad = torch.ones(4100, dtype=dtype)
    grad[place] = bad
    mine, their = twice([torch.ones(3, dtype=dtype), grad])
    assert both_ways(mine, their, method, 8.0) == [{CPU: 1.0}] * 2
    assert_same_tensors(grads_of(mine), grads_of(their))


@pytest.mark.parametrize("value", [3e38, 1e-45, -0.0])
def test_large_and_small_values_are_no_overflow(value: float) -> None:
    mine, their = twice([torch.full((100,), value)])
    assert both_ways(mine, their, "unscale_", 0.25) == [{CPU: 0.0}] * 2
    assert_same_tensors(grads_of(mine), grads_of(their))


@pytest.mark.parametrize("scale", [0.0, INF, NAN])
def test_odd_scales_do_what_they_do_in_torch(scale: float) -> None:
    mine, their = twice([torch.tensor([1.0, -2.0, 0.0])])
    found = both_ways(mine, their, "unscale_", scale)
    assert found[0] == found[1]
    assert_same_tensors(grads_of(mine), grads_of(their))


def test_without_gradients_nothing_is_recorded() -> None:
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(2))]
    assert both_ways(params, params, "unscale_", 8.0) == [{}, {}]


def test_the_check_writes_nothing_and_unscaling_bumps_the_version() -> None:
    params = params_with([torch.ones(3), torch.ones(2, dtype=torch.float16)])
    scaler, optimizer = make_scaler(), optimizer_over(params)
    scaler._check_inf_per_device(optimizer)
    assert [g._version for g in grads_of(params)] == [0, 0]
    assert_same_tensors(grads_of(params), [torch.ones(3), torch.ones(2, dtype=torch.float16)])
    scaler, optimizer = make_scaler(), optimizer_over(params[:1])
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * params[0].grad).sum()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("sparse", [False, True])
def test_fp16_gradients_are_refused_before_anything_is_written(sparse: bool) -> None:
    grads = [torch.ones(3), torch.ones(2, dtype=torch.float16)]
    if sparse:
        grads[1] = grads[1].to_sparse()
    params = [Parameter(torch.zeros_like(g.to_dense())) for g in grads]
    results = []
    for cls in (GradScaler, TORCHS):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        scaler = make_scaler(cls)
        results.append(outcome(partial(scaler.unscale_, optimizer_over(params))))
        assert_same_tensors([params[0].grad], [torch.ones(3)])
    assert results[0] == results[1]
    assert results[0][1:] == (ValueError, "Attempting to unscale FP16 gradients.")


def sparse_grad(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Two entries at one index, so that only coalescing shows their sum."""
    values = torch.tensor([[value, 1.0]] * 2, dtype=dtype)
    return torch.sparse_coo_tensor([[1, 1]], values, (3, 2), check_invariants=True)


@pytest.mark.parametrize("dense", [1.0, INF])
@pytest.mark.parametrize("value", [4.0, INF])
def test_sparse_gradients_beside_dense_ones(value: float, dense: float) -> None:
    results = []
    for cls in (GradScaler, TORCHS):
        embedding = Parameter(torch.ones(3, 2))
        embedding.grad = sparse_grad(value)
        (plain,) = params_with([torch.tensor([dense, 8.0])])
        scaler = make_scaler(cls)
        optimizer = optimizer_over([embedding, plain])
        scaler.unscale_(optimizer)
        results.append((found_inf(scaler, optimizer), [embedding.grad.to_dense(), plain.grad]))
    assert results[0][0] == results[1][0] == {CPU: float(INF in (value, dense))}
    assert_same_tensors(results[0][1], results[1][1])


def test_sparse_fp16_entries_are_summed_before_the_check() -> None:
    for cls in (GradScaler, TORCHS):
        embedding = Parameter(torch.ones(3, 2, dtype=torch.float16))
        embedding.grad = sparse_grad(6e4, torch.float16)
        scaler, optimizer = make_scaler(cls), optimizer_over([embedding])
        scaler._check_inf_per_device(optimizer)
        assert found_inf(scaler, optimizer) == {CPU: 1.0}
        assert embedding.grad.is_coalesced()


FOREIGN: dict[str, Callable[[], Tensor]] = {
    "complex": lambda: torch.tensor([3.0 + 4.0j, 1.0j]),
    "meta": lambda: torch.ones(2, device="meta"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_gradients_that_are_not_ours_take_torchs_way(kind: str) -> None:
    results = []
    for cls in (GradScaler, TORCHS):
        grad = FOREIGN[kind]()
        param = Parameter(torch.empty_like(grad))
        param.grad = grad
        results.append(outcome(partial(make_scaler(cls).unscale_, optimizer_over([param]))))
    assert results[0] == results[1]


def test_a_check_of_a_subclass_is_asked() -> None:
    scaler = make_scaler(Doubtful)
    (param,) = params_with([torch.ones(2)])
    optimizer = optimizer_over([param])
    assert scaler._check_inf_per_device(optimizer) == {CPU: 1.0}
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
