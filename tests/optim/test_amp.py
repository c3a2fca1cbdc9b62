"""found_inf and grad_scale: the contract between a GradScaler and a fused optimizer."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import faststep

from .common import (
    TOLERANCE,
    Snapshot,
    assert_near,
    assert_same_bits,
    parameters,
    set_gradients,
    train,
)
from .declarations import ALL, TORCHS, Declaration

SHAPES = ((33,), (4, 5))
SCALERS = (torch.amp.GradScaler, faststep.amp.GradScaler)

over_all = pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
over_torchs = pytest.mark.parametrize("declaration", TORCHS, ids=lambda d: d.name)
over_scalers = pytest.mark.parametrize("scaler_class", SCALERS, ids=["torch", "faststep"])
over_bad = pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])


def make(declaration: Declaration, **kwargs: Any) -> tuple[torch.optim.Optimizer, list[Parameter]]:
    """An optimizer as with `fused=True`: torch's scaler too leaves the gradients to its step."""
    params = parameters(*SHAPES)
    optimizer = declaration.ours(params, **{**declaration.kwargs, **kwargs})
    optimizer._step_supports_amp_scaling = True
    return optimizer, params


def started(scaler_class: Any, scale: float = 8.0) -> torch.amp.GradScaler:
    scaler = scaler_class("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))
    return scaler


def set_bad_gradients(params: list[Parameter], bad: float) -> None:
    """Gradients of which one element, in the last tensor, is not finite."""
    set_gradients(params, 50, scale=8.0)
    params[-1].grad[2, 3] = bad


@over_scalers
@over_bad
@pytest.mark.parametrize("kwargs", [{}, {"max_grad_norm": 0.5}], ids=["plain", "clipped"])
@over_all
def test_skip_changes_nothing(
    declaration: Declaration, kwargs: dict[str, Any], bad: float, scaler_class: Any
) -> None:
    """In the middle of training: parameters, moments, step and gradients keep every bit."""
    optimizer, params = make(declaration, **kwargs)
    train(optimizer, params, steps=2)
    assert not optimizer.step_was_skipped
    scaler = started(scaler_class)
    set_bad_gradients(params, bad)
    before = Snapshot(optimizer)
    assert scaler.step(optimizer) is None
    before.assert_unchanged()
    assert optimizer.step_was_skipped is True
    scaler.update()
    assert scaler.get_scale() == 4.0
    train(optimizer, params, seed=2, scaler=scaler)
    assert optimizer.step_was_skipped is False


@over_scalers
@over_all
def test_skipped_first_step(declaration: Declaration, scaler_class: Any) -> None:
    """After a skip the next step is the first one: no garbage in SGD's momentum buffer.

    torch's fused SGD allocates the buffer before it skips and so keeps uninitialised memory.
    """
    optimizer, params = make(declaration)
    scaler = started(scaler_class)
    set_bad_gradients(params, float("inf"))
    scaler.step(optimizer)
    scaler.update()
    for p in params:
        for key, value in optimizer.state.get(p, {}).items():
            assert value is None or not value.any(), f"{key} is {value} after a skipped step"
    assert not any("momentum_buffer" in values for values in optimizer.state.values()) or (
        all(values.get("momentum_buffer") is None for values in optimizer.state.values())
    )
    untouched, expected = make(declaration)
    train(optimizer, params, steps=2, scaler=scaler)
    train(untouched, expected, steps=2)
    assert_same_bits(params, expected, "training after a skipped first step")


@over_torchs
def test_gradients_of_a_scale_that_is_no_power_of_two(declaration: Declaration) -> None:
    """Against torch's fused class with the same scaler: gradients, parameters, states."""
    optimizer, params = make(declaration)
    theirs = parameters(*SHAPES)
    fused = declaration.torchs(theirs, **declaration.kwargs, fused=True)
    for o, ps in ((optimizer, params), (fused, theirs)):
        train(o, ps, steps=3, scaler=started(torch.amp.GradScaler, scale=1000.0))
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=3e-7, atol=0.0)
        assert_near(p, q, TOLERANCE, "parameters")
    for group, other in zip(optimizer.param_groups, fused.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            for key in declaration.moments(group):
                left, right = optimizer.state[p][key], fused.state[q][key]
                assert_near(left, right, TOLERANCE, key)


@over_scalers
@over_all
def test_clipping_leaves_gradients_alone(declaration: Declaration, scaler_class: Any) -> None:
    """With max_grad_norm gradients stay scaled; keep_grads=True writes what was applied."""
    kept, kept_params = make(declaration, max_grad_norm=0.5, keep_grads=True)
    left, left_params = make(declaration, max_grad_norm=0.5)
    manual, manual_params = make(declaration)
    for o, ps in ((kept, kept_params), (left, left_params)):
        train(o, ps, scaler=started(scaler_class))
    set_gradients(manual_params, 0)
    norm = faststep.clip_grad_norm_(manual_params, 0.5)
    manual.step()
    assert norm.item() > 0.5
    applied = [p.grad for p in manual_params]
    assert_same_bits([p.grad for p in kept_params], applied, "keep_grads: unscaled and clipped")
    set_gradients(manual_params, 0, scale=8.0)
    assert_same_bits([p.grad for p in left_params], [p.grad for p in manual_params], "gradients")
    assert_same_bits(kept_params, left_params, "keep_grads must not change the update")
    assert_same_bits(kept_params, manual_params, "unscale, clip and step by hand")


@pytest.mark.parametrize("found", [1.0, 2.0, 0.5, float("inf"), float("nan")])
@over_all
def test_any_found_inf_but_zero_skips(declaration: Declaration, found: float) -> None:
    """The scaler sums found_inf over devices; torch's kernels ask == 1 and miss a sum of 2."""
    optimizer, params = make(declaration)
    train(optimizer, params)
    set_gradients(params, 1)
    before = Snapshot(optimizer)
    optimizer.found_inf = torch.tensor(found)
    optimizer.step()
    before.assert_unchanged()
    assert optimizer.step_was_skipped is True
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert optimizer.step_was_skipped is False
    assert not torch.equal(params[0], before.tensors[0])


@over_all
def test_grad_scale_alone(declaration: Declaration) -> None:
    """A framework may set optimizer.grad_scale itself, without a scaler and without found_inf."""
    optimizer, params = make(declaration)
    plain, expected = make(declaration)
    set_gradients(params, 0, scale=4.0)
    set_gradients(expected, 0)
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.step()
    plain.step()
    assert_same_bits([p.grad for p in params], [p.grad for p in expected], "written back")
    assert_same_bits(params, expected, "parameters")
    optimizer.grad_scale = None
    set_gradients(params, 1)
    set_gradients(expected, 1)
    optimizer.step()
    plain.step()
    assert_same_bits(params, expected, "grad_scale None is no scale")


@over_scalers
@over_all
def test_product_with_a_scale_of_the_user(declaration: Declaration, scaler_class: Any) -> None:
    """torch multiplies an existing grad_scale: accumulation over N steps sets it to N."""
    optimizer, params = make(declaration)
    plain, expected = make(declaration)
    scaler = started(scaler_class)
    set_gradients(params, 0, scale=32.0)
    set_gradients(expected, 0)
    optimizer.grad_scale = torch.tensor(4.0)
    scaler.step(optimizer)
    plain.step()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    assert_same_bits(params, expected, "parameters")


@over_scalers
@over_all
def test_fp16_gradients(declaration: Declaration, scaler_class: Any) -> None:
    """unscale_ refuses fp16 gradients, the fused path takes them: as torch's fused classes."""
    params = parameters(*SHAPES, dtype=torch.float16)
    optimizer = declaration.ours(params, **declaration.kwargs)
    optimizer._step_supports_amp_scaling = True
    scaler = started(scaler_class)
    set_gradients(params, 0, scale=8.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    scaler = started(scaler_class)
    scaler.step(optimizer)
    expected = parameters(*SHAPES, dtype=torch.float16)
    train(declaration.ours(expected, **declaration.kwargs), expected)
    assert_same_bits(params, expected, "parameters")
