"""Code that a script runs before the update, and second optimizers: refused before any update."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as of_torch

import faststep
from faststep import optim


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def own_hook(optimizer: Any) -> Callable[[], object]:
    return optimizer.register_step_pre_hook(lambda *_: None).remove


def global_hook(optimizer: Any) -> Callable[[], object]:
    return of_torch.register_optimizer_step_pre_hook(lambda *_: None).remove


def patched_object(optimizer: Any) -> Callable[[], object]:
    inner = optimizer.step
    optimizer.step = lambda *args: inner(*args)
    return lambda: vars(optimizer).pop("step")


def patched_object_over_a_scheduler(optimizer: Any) -> Callable[[], object]:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    inner = optimizer.step
    optimizer.step = types.MethodType(lambda self, *args: inner(*args), optimizer)
    return lambda: vars(optimizer).pop("step")


def patched_class(optimizer: Any) -> Callable[[], object]:
    cls = type(optimizer)
    before = cls.step
    cls.step = lambda self, *args: before(self, *args)
    return lambda: setattr(cls, "step", before)


def patched_class_of_torch(optimizer: Any) -> Callable[[], object]:
    cls: Any = torch.optim.AdamW
    before = cls.__dict__.get("step")
    inner = cls.step
    cls.step = lambda self, *args: inner(self, *args)
    return lambda: setattr(cls, "step", before) if before else delattr(cls, "step")


WAYS = [
    *(own_hook, global_hook, patched_object, patched_object_over_a_scheduler, patched_class),
    patched_class_of_torch,
]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("set_up", WAYS)
def test_code_before_the_step(set_up: Callable[[Any], Callable[[], object]], early: bool) -> None:
    model = model_of()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()  # the class has its hooks
    if early:
        undo = set_up(optimizer)
        try:
            with pytest.raises((RuntimeError, TypeError), match=r"would find no gradients|pass by"):
                faststep.release_gradients(model, optimizer)
        finally:
            undo()
        faststep.release_gradients(model, optimizer)
        return
    release = faststep.release_gradients(model, optimizer)
    backward(model)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    undo = set_up(optimizer)
    try:
        with pytest.raises(RuntimeError, match="would find no gradients"):
            backward(model)
    finally:
        undo()
    assert all(map(torch.equal, before, model.parameters()))
    model.zero_grad()
    backward(model)
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
    release.remove()


def test_schedulers_and_post_hooks_are_fine() -> None:
    model = model_of()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    faststep.release_gradients(model, optimizer)
    for _ in range(2):
        backward(model)
        optimizer.step()
        scheduler.step()
    assert seen == [1, 1]


@pytest.mark.parametrize("second", [optim.SGD, torch.optim.SGD])
@pytest.mark.parametrize("first_released", [False, True])
def test_two_optimizers_over_one_parameter(second: Any, first_released: bool) -> None:
    model = model_of()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    if first_released:
        faststep_release = faststep.release_gradients(model, optimizer)
        if second is torch.optim.SGD:
            return  # documented: torch's are not asked
        with pytest.raises(RuntimeError, match="Give each parameter to one optimizer"):
            second(model[1].parameters(), lr=1.0)  # type: ignore[index]
        other = second([nn.Parameter(torch.ones(2))], lr=1.0)
        with pytest.raises(RuntimeError, match="Give each parameter to one optimizer"):
            other.add_param_group({"params": model[0].parameters()})  # type: ignore[index]
        assert len(other.param_groups) == 1
        faststep_release.remove()
        second(model.parameters(), lr=1.0)
        return
    other = second(model[1].parameters(), lr=1.0)  # type: ignore[index]
    with pytest.raises(RuntimeError, match="has parameters of this SGD"):
        faststep.release_gradients(model, optimizer)
    del other
    faststep.release_gradients(model, optimizer)
