"""Optimizers, scalers and clipping keep no memory and no references over many steps."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import faststep

from .test_leaks import assert_no_growth, assert_references_stay, parameters

CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": faststep.optim.AdamW,
    "amsgrad": lambda ps, **kw: faststep.optim.Adam(ps, amsgrad=True, **kw),
    "SGD": faststep.optim.SGD,
    "momentum": lambda ps, **kw: faststep.optim.SGD(ps, momentum=0.9, **kw),
    "Lion": faststep.optim.Lion,
    "int8": lambda ps, **kw: faststep.optim.AdamW(
        ps, betas=(0.9, 0.99), state_dtype="int8", min_8bit_size=1, **kw
    ),
    "Rprop": faststep.optim.Rprop,
    "NAdam": faststep.optim.NAdam,
}

over_classes = pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES.keys())


def every_tensor(optimizer: torch.optim.Optimizer) -> list[Any]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for values in optimizer.state.values() for value in values.values()]
    return [*params, *(p.grad for p in params), *states, optimizer.state, optimizer.param_groups]


@over_classes
def test_steps(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Plain steps, and clipped ones that write the gradients back."""
    plain, clipped = make(parameters()), make(parameters(), max_grad_norm=1.0, keep_grads=True)
    for optimizer in (plain, clipped):
        optimizer.step()
        assert_references_stay(optimizer.step, every_tensor(optimizer))
    assert_no_growth(plain.step, clipped.step)


@over_classes
def test_steps_with_changing_tensors(make: Callable[..., torch.optim.Optimizer]) -> None:
    """New gradients, new states and a changing number of parameters: the plan is made anew."""
    params = parameters()
    optimizer = make(params)
    dropped = optimizer.param_groups[0]["params"].pop()

    def change() -> None:
        for p in params[:3]:
            p.grad = torch.ones_like(p)
        optimizer.state.pop(params[0], None)
        optimizer.step()
        optimizer.param_groups[0]["params"].append(dropped)
        dropped.grad = torch.ones_like(dropped)
        optimizer.step()
        optimizer.param_groups[0]["params"].pop()

    assert_no_growth(change)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, faststep.amp.GradScaler])
@over_classes
def test_scaler(make: Callable[..., torch.optim.Optimizer], scaler_class: Any) -> None:
    """Iterations that step and iterations that skip."""
    params = [p for p in parameters() if p.grad is not None]
    optimizer = make(params, max_grad_norm=1.0)
    scaler = scaler_class("cpu", init_scale=2.0)
    loss = torch.ones(())

    def iterate() -> None:
        for value in (1.0, float("inf")):
            params[0].grad.fill_(value)
            scaler.scale(loss)
            scaler.step(optimizer)
            scaler.update(2.0)

    iterate()
    assert_references_stay(iterate, every_tensor(optimizer))
    assert_no_growth(iterate)


def test_clip_functions() -> None:
    params = [p for p in parameters() if p.grad is not None]
    norm = torch.tensor(1.0)

    def clip() -> None:
        faststep.clip_grad_norm_(params, 1.0)
        faststep.clip_grad_norm_(params, 1.0, norm_type=3.0)
        faststep.clip_grad_value_(params, 1.0)
        faststep.clip_grads_with_norm_(params, 1.0, norm)
        faststep.get_total_norm([p.grad for p in params])

    assert_references_stay(clip, [*params, *(p.grad for p in params), norm])
    assert_no_growth(clip)


@over_classes
def test_steps_that_raise(make: Callable[..., torch.optim.Optimizer]) -> None:
    """A parameter that overlaps itself after a good one, and a grad_scale of the wrong shape."""
    good, bad = Parameter(torch.ones(7)), Parameter(torch.ones(1).expand(3))
    good.grad, bad.grad = torch.ones(7), torch.ones(3)
    refusing, scaled = make([good, bad]), make([good])
    scaled.grad_scale = torch.ones(2)

    def fail() -> None:
        for optimizer in (refusing, scaled):
            try:
                optimizer.step()
            except (TypeError, RuntimeError):
                continue
            pytest.fail("the step must raise")

    assert_references_stay(fail, [good, bad, good.grad, bad.grad])
    assert_no_growth(fail)


@over_classes
def test_optimizers_die(make: Callable[..., torch.optim.Optimizer]) -> None:
    """A dropped optimizer frees its plan and its parameters, and making one leaks nothing."""
    params = parameters()

    def live() -> None:
        optimizer = make(params)
        optimizer.step()

    assert_no_growth(live)
    alone = Parameter(torch.ones(5))
    alone.grad = torch.ones(5)
    optimizer = make([alone])
    optimizer.step()
    seen = weakref.ref(alone), weakref.ref(optimizer)
    del alone, optimizer
    gc.collect()
    assert [reference() for reference in seen] == [None, None]
