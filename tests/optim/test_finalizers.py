"""Finalizers that run in the middle of a step.

Up to CPython 3.11 the cyclic collector, and with it any finalizer, runs whenever a container is
allocated, in C too. Whatever such code drops or replaces, a parameter must be as it was or have
taken its own step, never one with another tensor's values.
"""

import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Iterator

import pytest
import torch

import faststep

from .acting import (
    COUNT,
    SIZE,
    Action,
    Model,
    alike,
    bound_again,
    drop_grads,
    over_actions,
    plain,
    replace_grads,
)


@dataclasses.dataclass
class Fuse:
    action: Action
    burnt: bool = False
    cut: bool = False


class Bomb:
    """Garbage that acts when it is collected for the n-th time; its fuse can be cut."""

    def __init__(self, fuse: Fuse, left: int) -> None:
        self.itself, self.fuse, self.left = self, fuse, left

    def __del__(self) -> None:
        if self.fuse.cut:
            return
        if self.left:
            Bomb(self.fuse, self.left - 1)
        else:
            self.fuse.burnt = True
            self.fuse.action()


@pytest.fixture(scope="module")
def eager_collector() -> Iterator[None]:
    """The collector runs at every allocation, over young objects only."""
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    gc.set_threshold(1, 1000, 1000)
    yield
    gc.set_threshold(*before)
    gc.collect()
    if enabled:
        gc.enable()


def explode_in(model: Model, action: Callable[[Model], None], work: Action, left: int) -> bool:
    """Calls `work` while the collector runs; whether the bomb went off there."""
    fuse = Fuse(lambda: action(model))
    Bomb(fuse, left)
    gc.enable()
    try:
        work()
    finally:
        gc.disable()
        fuse.cut = True
    return fuse.burnt


def explosions(
    make: Callable[[], Model],
    action: Callable[[Model], None],
    work: Callable[[Model], object],
    check: Callable[[Model], None] = Model.assert_untouched,
) -> int:
    """`action` at many points of `work`, each on a model of its own; how often it came there."""
    hits = 0
    for left in range(0, 2 * COUNT, 6):
        model = make()
        model.backward()
        hits += explode_in(model, action, functools.partial(work, model), left)
        check(model)
    return hits


@pytest.mark.parametrize("make", [plain, bound_again, alike], ids=lambda make: make.__name__)
@over_actions
@pytest.mark.usefixtures("eager_collector")
def test_finalizer_in_a_step(make: Callable[[], Model], action: Callable[[Model], None]) -> None:
    zeros = [torch.zeros(SIZE)] * COUNT
    assert explosions(
        make, action, lambda model: model.optimizer.step(), lambda m: m.assert_own_values(zeros)
    )


def keep_grads() -> Model:
    return Model(max_grad_norm=1e30, keep_grads=True)


@over_actions
@pytest.mark.usefixtures("eager_collector")
def test_finalizer_in_a_step_that_writes_gradients(action: Callable[[Model], None]) -> None:
    zeros = [torch.zeros(SIZE)] * COUNT
    assert explosions(
        keep_grads,
        action,
        lambda model: model.optimizer.step(),
        lambda model: model.assert_own_values(zeros),
    )


def clip(model: Model) -> None:
    """The norm is that of gradients: those that there were, those that are left, or some."""
    whole = math.sqrt(SIZE * sum((i + 1.0) ** 2 for i in range(COUNT)))
    assert 0 <= faststep.clip_grad_norm_(model.params, 1.0) <= whole * 1.0001


def unscale(model: Model) -> None:
    scaler = faststep.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(model.optimizer)
    assert not any(scaler._found_inf_per_device(model.optimizer).values())


@pytest.mark.parametrize("work", [clip, unscale], ids=lambda work: work.__name__)
@pytest.mark.parametrize("action", [drop_grads, replace_grads], ids=lambda action: action.__name__)
@pytest.mark.usefixtures("eager_collector")
def test_finalizer_in_clipping(
    work: Callable[[Model], None], action: Callable[[Model], None]
) -> None:
    assert explosions(plain, action, work)
