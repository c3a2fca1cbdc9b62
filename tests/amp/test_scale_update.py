"""The update of the scale: torch's numbers by default, bounds and hysteresis on top."""

import math
from dataclasses import replace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from faststep.amp import GradScaler
from faststep.amp.scale_update import ScaleUpdate
from scalers import iterate, make_scaler

INF = math.inf
# Overflow or not, per step.
STEPS = st.lists(st.booleans(), max_size=20)
RULES = st.builds(
    ScaleUpdate,
    growth_factor=st.floats(1.001, 100.0),
    backoff_factor=st.floats(1e-3, 0.999),
    growth_interval=st.integers(1, 4),
    min_scale=st.none() | st.floats(1e-3, 10.0),
    max_scale=st.none() | st.floats(10.0, 1e30),
    hysteresis=st.integers(1, 4),
)
SCALES = st.floats(2.0**-20, 2.0**127, width=32)


def slow_rule(rule: ScaleUpdate, scale: float, steps: list[bool]) -> list[tuple[float, int, int]]:
    """(scale, growth tracker, hysteresis tracker) after each step, written out."""
    growth, left, history = 0, rule.hysteresis, []
    for overflow in steps:
        if overflow:
            growth = 0
            left -= 1
            if left <= 0:
                scale = float(np.float32(scale * rule.backoff_factor))
        else:
            growth += 1
            if growth == rule.growth_interval:
                growth = 0
                left = rule.hysteresis
                with np.errstate(over="ignore"):
                    grown = float(np.float32(scale * rule.growth_factor))
                if grown != INF:
                    scale = grown
        if rule.min_scale is not None:
            scale = float(np.float32(max(scale, np.float32(rule.min_scale))))
        if rule.max_scale is not None:
            scale = float(np.float32(min(scale, np.float32(rule.max_scale))))
        history.append((scale, growth, left))
    return history


def run_rule(
    rule: ScaleUpdate, way: str, scale: float, steps: list[bool]
) -> list[tuple[float, int, int]]:
    tensors = (
        torch.tensor(scale),
        torch.tensor(0, dtype=torch.int32),
        torch.tensor(rule.hysteresis, dtype=torch.int32),
    )
    history = []
    for overflow in steps:
        found_inf = torch.tensor(float(overflow))
        getattr(rule, way)(*tensors, found_inf)
        assert found_inf == float(overflow)
        history.append(tuple(t.item() for t in tensors))
    return history


@pytest.mark.parametrize("way", ["_update_in_c", "_update_in_torch"])
@hypothesis.given(rule=RULES, scale=SCALES, steps=STEPS)
def test_both_ways_follow_the_rule(
    way: str, rule: ScaleUpdate, scale: float, steps: list[bool]
) -> None:
    assert run_rule(rule, way, scale, steps) == slow_rule(rule, scale, steps)


@pytest.mark.parametrize("way", ["_update_in_c", "_update_in_torch", "update"])
@hypothesis.given(rule=RULES, scale=SCALES, steps=STEPS)
def test_without_extras_the_numbers_are_torchs(
    way: str, rule: ScaleUpdate, scale: float, steps: list[bool]
) -> None:
    rule = replace(rule, min_scale=None, max_scale=None, hysteresis=1)
    expected, tracker = torch.tensor(scale), torch.tensor(0, dtype=torch.int32)
    mine = run_rule(rule, way, scale, steps)
    for overflow, (scale_after, tracker_after, _) in zip(steps, mine, strict=True):
        torch._amp_update_scale_(
            expected,
            tracker,
            torch.tensor(float(overflow)),
            rule.growth_factor,
            rule.backoff_factor,
            rule.growth_interval,
        )
        assert (scale_after, tracker_after) == (expected.item(), tracker.item())


@pytest.mark.parametrize("way", ["_update_in_c", "_update_in_torch", "update"])
@pytest.mark.parametrize("found_inf", [2.0, -1.0, math.nan, INF, 1e-30])
def test_anything_but_zero_is_an_overflow(way: str, found_inf: float) -> None:
    rule = ScaleUpdate(2.0, 0.5, 1, min_scale=1e-3)
    scale, tracker = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
    getattr(rule, way)(scale, tracker, None, torch.tensor(found_inf))
    assert (scale, tracker) == (4.0, 0)


@pytest.mark.parametrize("way", ["_update_in_c", "_update_in_torch", "update"])
def test_the_scale_is_updated_in_place_and_autograd_sees_it(way: str) -> None:
    scale, tracker = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
    outputs = torch.ones(2, requires_grad=True)
    loss = (outputs * scale).sum()
    getattr(ScaleUpdate(2.0, 0.5, 1, max_scale=100.0), way)(scale, tracker, None, torch.tensor(0.0))
    assert scale == 16.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bounds_hold_from_both_sides() -> None:
    scaler = make_scaler(init_scale=4.0, growth_interval=1, min_scale=1.5, max_scale=10.0)
    assert [iterate(scaler, True) for _ in range(3)] == [2.0, 1.5, 1.5]
    assert [iterate(scaler, False) for _ in range(4)] == [3.0, 6.0, 10.0, 10.0]


def test_a_loaded_scale_outside_the_bounds_comes_back_at_the_next_update() -> None:
    scaler = make_scaler(init_scale=4.0, min_scale=1.0, max_scale=10.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 512.0})
    assert scaler.get_scale() == 512.0
    assert iterate(scaler, False) == 10.0


def test_hysteresis_counts_overflows_since_the_last_growth() -> None:
    scaler = make_scaler(init_scale=64.0, growth_interval=2, hysteresis=3)
    two_tolerated = [iterate(scaler, o) for o in (True, False, True)]
    assert two_tolerated == [64.0, 64.0, 64.0]
    assert iterate(scaler, True) == 32.0
    # A step without overflow does not refill the tracker; growth does.
    assert [iterate(scaler, o) for o in (False, True)] == [32.0, 16.0]
    assert [iterate(scaler, o) for o in (False, False)] == [16.0, 32.0]
    assert [iterate(scaler, o) for o in (True, True, True)] == [32.0, 32.0, 16.0]


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"min_scale": 0.0}, ValueError, "min_scale must be positive and finite"),
        ({"min_scale": -1.0}, ValueError, "min_scale must be positive and finite"),
        ({"min_scale": math.nan}, ValueError, "min_scale must be positive and finite"),
        ({"max_scale": INF}, ValueError, "max_scale must be positive and finite"),
        ({"min_scale": 9.0, "max_scale": 8.0}, ValueError, "must not be above max_scale"),
        ({"min_scale": 9.0}, ValueError, r"init_scale \(8.0\) must lie between"),
        ({"max_scale": 4.0}, ValueError, r"init_scale \(8.0\) must lie between"),
        ({"hysteresis": 0}, ValueError, "hysteresis must be at least 1, but is 0"),
        ({"hysteresis": 2.0}, TypeError, "hysteresis must be an int, but is a float"),
        ({"hysteresis": True}, TypeError, "hysteresis must be an int, but is a bool"),
    ],
)
def test_extras_out_of_range(kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        GradScaler("cpu", 8.0, **kwargs)


def test_extras_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional arguments"):
        GradScaler("cpu", 8.0, 2.0, 0.5, 2000, True, 1.0)
