"""max_grad_norm: clipping inside the step, its norm, and what it says of skipped steps."""

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import faststep

from .common import (
    DTYPES,
    Snapshot,
    assert_same_bits,
    dtype_name,
    parameters,
    same_bits,
    set_gradients,
    train,
)
from .declarations import ALL, SGD, Declaration
from .references import total_norm

SHAPES = ((1000,), (40, 50), (7,), ())

over_all = pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)


def make(
    declaration: Declaration, dtype: Any = None, **kwargs: Any
) -> tuple[torch.optim.Optimizer, list[Parameter]]:
    params = parameters(*SHAPES, dtype=dtype)
    groups = [{"params": params[:2]}, {"params": params[2:], **declaration.other}]
    return declaration.ours(groups, **declaration.kwargs, **kwargs), params


def grads(params: list[Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in params]


@pytest.mark.parametrize("max_norm", [0.5, 10.0, 1e6, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
@over_all
def test_equals_clip_then_step(
    declaration: Declaration, dtype: torch.dtype, max_norm: float
) -> None:
    """Bit for bit clip_grad_norm_ followed by step; a norm below the limit changes nothing."""
    fused, params = make(declaration, dtype, max_grad_norm=max_norm, keep_grads=True)
    manual, expected = make(declaration, dtype)
    for step in range(3):
        set_gradients(params, step)
        set_gradients(expected, step)
        norm = faststep.clip_grad_norm_(expected, max_norm)
        manual.step()
        fused.step()
        assert fused.last_grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        if dtype == torch.float32:
            assert_same_bits(grads(params), grads(expected), "clipped gradients")
            assert_same_bits(params, expected, "parameters")
        for p, q in zip(params, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-7)


@over_all
def test_gradients_are_left_alone(declaration: Declaration) -> None:
    """Without keep_grads neither a plain nor a clipped step touches .grad or its version."""
    for kwargs in ({}, {"max_grad_norm": 0.5}):
        optimizer, params = make(declaration, **kwargs)
        set_gradients(params, 0)
        copies = [g.clone() for g in grads(params)]
        versions = [g._version for g in grads(params)]
        optimizer.step()
        assert_same_bits(grads(params), copies, "gradients")
        assert [g._version for g in grads(params)] == versions


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@over_all
def test_last_grad_norm(declaration: Declaration, dtype: torch.dtype) -> None:
    """Within 1e-6 of a correctly rounded fp64 sum, on 0.7M elements of every dtype."""
    params = parameters((500_000,), (400, 501), (3,), dtype=dtype)
    optimizer = declaration.ours(params, max_grad_norm=1.0)
    assert optimizer.last_grad_norm is None
    set_gradients(params, 0)
    optimizer.step()
    norm = optimizer.last_grad_norm
    assert (norm.shape, norm.dtype, norm.device.type) == ((), torch.float32, "cpu")
    assert norm.item() == pytest.approx(total_norm(grads(params)), rel=1e-6)
    optimizer.zero_grad()
    set_gradients(params[2:], 1)
    optimizer.step()
    assert optimizer.last_grad_norm.item() == pytest.approx(total_norm([params[2].grad]), rel=1e-6)
    assert norm.item() != optimizer.last_grad_norm.item(), "an earlier norm is not overwritten"


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, faststep.amp.GradScaler])
def test_a_step_that_is_skipped_before_it_measures_has_no_norm(scaler_class: Any) -> None:
    """It is NaN, as on CUDA devices, and not that of a step before."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = faststep.optim.SGD([param], lr=0.1, max_grad_norm=1.0)
    scaler = scaler_class("cpu", init_scale=4.0)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((param * factor).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.step_was_skipped
    assert optimizer.last_grad_norm is not None
    assert optimizer.last_grad_norm.isnan()


@pytest.mark.parametrize("value", [-1.0, math.nan])
@over_all
def test_a_limit_out_of_range_that_was_set_later(declaration: Declaration, value: float) -> None:
    """NaN must not mean that nothing is clipped, nor a negative limit that gradients turn round."""
    optimizer, params = make(declaration, max_grad_norm=1.0)
    set_gradients(params, 0)
    optimizer.step()
    optimizer.max_grad_norm = value
    before = Snapshot(optimizer)
    with pytest.raises(ValueError, match="Invalid max_grad_norm value"):
        optimizer.step()
    before.assert_unchanged()


def test_norm_ignores_the_default_device() -> None:
    optimizer, params = make(ALL[0], max_grad_norm=1.0)
    set_gradients(params, 0)
    optimizer.step()
    with torch.device("meta"):
        assert optimizer.last_grad_norm.device == torch.device("cpu")


@over_all
def test_norm_of_large_gradients(declaration: Declaration) -> None:
    """|g| of 1e19 to 1e30 overflows an fp32 sum of squares; the clipped step stays finite."""
    for size in (1e19, 1e30):
        params = parameters((100,))
        optimizer = declaration.ours(params, max_grad_norm=1.0, keep_grads=True)
        params[0].grad = torch.full((100,), size)
        optimizer.step()
        assert optimizer.last_grad_norm.item() == pytest.approx(10.0 * size, rel=1e-6)
        torch.testing.assert_close(params[0].grad, torch.full((100,), 0.1))
        assert torch.isfinite(params[0]).all()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@over_all
def test_non_finite_norm_without_scaler(declaration: Declaration, bad: float) -> None:
    """torch's formula, never a silent skip: inf gives coefficient 0 and inf * 0, NaN spreads."""
    fused, params = make(declaration, max_grad_norm=1.0, keep_grads=True)
    manual, expected = make(declaration)
    for optimizer, ps in ((fused, params), (manual, expected)):
        set_gradients(ps, 0)
        ps[1].grad[3, 4] = bad
        if optimizer is manual:
            torch.nn.utils.clip_grad_norm_(ps, 1.0)
        optimizer.step()
    assert fused.step_was_skipped is False
    assert str(fused.last_grad_norm.item()) == str(abs(bad))
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True, rtol=0.0, atol=0.0)
        torch.testing.assert_close(p, q, equal_nan=True)
    spoilt = sum(int(torch.isnan(p).sum()) for p in params)
    assert spoilt == (sum(p.numel() for p in params) if math.isnan(bad) else 1)


@over_all
def test_norm_covers_all_groups_and_dtypes(declaration: Declaration) -> None:
    """One global norm: a group-wise one would let the small group through unclipped."""
    wide, narrow = parameters((10,)), parameters((10,), dtype=torch.bfloat16)
    optimizer = declaration.ours(
        [{"params": wide}, {"params": narrow}], max_grad_norm=1.0, keep_grads=True
    )
    wide[0].grad = torch.full((10,), 100.0)
    narrow[0].grad = torch.full((10,), 0.125, dtype=torch.bfloat16)
    optimizer.step()
    expected = total_norm([torch.full((10,), 100.0), torch.full((10,), 0.125)])
    assert optimizer.last_grad_norm.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(
        narrow[0].grad.float(), torch.full((10,), 0.125 / expected), rtol=4e-3, atol=0.0
    )


@over_all
def test_order_of_parameters_may_change(declaration: Declaration) -> None:
    """The norm's last bit may depend on the order of the list, nothing more."""
    forward, backward = parameters(*SHAPES), parameters(*SHAPES)
    for params, order in ((forward, forward), (backward, backward[::-1])):
        optimizer = declaration.ours(order, **declaration.kwargs, max_grad_norm=0.5)
        train(optimizer, params, steps=2)
    for p, q in zip(forward, backward, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@over_all
def test_max_norm_of_the_scaler(declaration: Declaration) -> None:
    """scaler.step(optimizer, max_norm=...) is max_grad_norm for that one step, whatever that is."""
    fused, params = make(declaration, max_grad_norm=0.5)
    other, expected = make(declaration, max_grad_norm=1e9)
    for optimizer, ps, extra in ((fused, params, {}), (other, expected, {"max_norm": 0.5})):
        scaler = faststep.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        set_gradients(ps, 0, scale=8.0)
        scaler.step(optimizer, **extra)
    assert same_bits(fused.last_grad_norm, other.last_grad_norm)
    assert_same_bits(params, expected, "parameters")
    fused.max_grad_norm = None
    train(fused, params, seed=1)
    train(other, expected, seed=1)
    assert_same_bits(params, expected, "the next step is not clipped")


@over_all
def test_max_norm_of_the_scaler_does_not_stay(declaration: Declaration) -> None:
    """The step after scaler.step(max_norm=...) is not clipped, also when that one raised."""
    optimizer, params = make(declaration)
    scaler = faststep.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    set_gradients(params, 0, scale=8.0)

    def failing(*args: Any) -> None:
        raise KeyError("from a hook")

    handle = optimizer.register_step_pre_hook(failing)
    with pytest.raises(KeyError):
        scaler.step(optimizer, max_norm=1e-3)
    handle.remove()
    plain, expected = make(declaration)
    train(optimizer, params)
    train(plain, expected)
    assert_same_bits(params, expected, "after a step that raised")


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, faststep.amp.GradScaler])
def test_norm_of_a_skipped_step(scaler_class: Any) -> None:
    """No invented number: the norm is not finite, or that of the last step that measured."""
    optimizer, params = make(SGD, max_grad_norm=0.5)
    train(optimizer, params)
    measured = optimizer.last_grad_norm.item()
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    set_gradients(params, 1, scale=8.0)
    params[0].grad[5] = float("inf")
    before = Snapshot(optimizer)
    scaler.step(optimizer)
    before.assert_unchanged()
    assert optimizer.step_was_skipped
    norm = optimizer.last_grad_norm.item()
    assert norm == measured or not math.isfinite(norm)


def test_attributes_can_be_changed() -> None:
    """max_grad_norm and keep_grads are plain attributes, read at every step."""
    optimizer, params = make(SGD)
    plain, expected = make(SGD, max_grad_norm=0.5, keep_grads=True)
    optimizer.max_grad_norm, optimizer.keep_grads = 0.5, True
    train(optimizer, params)
    train(plain, expected)
    assert_same_bits(params, expected, "parameters")
    assert_same_bits(grads(params), grads(expected), "gradients")
