"""Optimizers that accelerate or Lightning has wrapped, by replicas and by the libraries."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from faststep.optim import AdamW


class GradientState:
    """accelerate's, as far as an optimizer looks at it."""

    def __init__(self, num_steps: int = 1) -> None:
        self.num_steps = num_steps
        self.sync_gradients = True


class AcceleratedOptimizer(torch.optim.Optimizer):
    """accelerate 1.15's wrapper, call by call; it has none of the attributes of its base."""

    __module__ = "accelerate.optimizer"

    def __init__(self, optimizer: Any, scaler: Any = None, num_steps: int = 1) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.gradient_state = GradientState(num_steps)
        self.original = None if scaler is None else optimizer.step

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:
        if not self.gradient_state.sync_gradients:
            return
        if self.scaler is None:
            self.optimizer.step(closure)
            return
        self.optimizer.step = lambda *args, **kwargs: self.original(*args, **kwargs)
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        self.optimizer.step = self.original


class LightningOptimizer:
    """Lightning 2.6's wrapper, which takes the class of what it wraps for a second base."""

    __module__ = "lightning.pytorch.core.optimizer"

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        bases = (self.__class__, optimizer.__class__)
        self.__class__ = type("LightningAdamW", bases, {"__module__": self.__module__})

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        return self._optimizer.step(closure=closure, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def real_accelerate(optimizer: Any) -> Any:
    accelerate = pytest.importorskip("accelerate", exc_type=ImportError)
    return accelerate.Accelerator(cpu=True).prepare(optimizer)


def real_fabric(optimizer: Any) -> Any:
    pytest.importorskip("lightning.fabric", exc_type=ImportError)
    wrappers = importlib.import_module("lightning.fabric.wrappers")
    strategies = importlib.import_module("lightning.fabric.strategies")
    return wrappers._FabricOptimizer(optimizer, strategies.SingleDeviceStrategy())


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "accelerate": AcceleratedOptimizer,
    "accelerate itself": real_accelerate,
}
over_wrappers = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def model_of() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def loss_of(model: nn.Module, number: int) -> Tensor:
    source = torch.Generator().manual_seed(number)
    loss: Tensor = model(torch.randn(3, 4, generator=source)).square().mean()
    return loss


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(mine: list[Tensor], other: list[Tensor]) -> None:
    assert all(map(torch.equal, mine, other))


def accumulated(wrap: Callable[[Any], Any], install: bool) -> list[Tensor]:
    model = model_of()
    optimizer = wrap(AdamW(model.parameters(), lr=0.1))
    accum = faststep.accumulate(optimizer, 2, model=model)
    if install:
        accum.install()
    for number in range(6):
        if install:
            loss_of(model, number).backward()
        else:
            with accum:
                accum.backward(loss_of(model, number))
            if not accum.ready:
                continue
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@over_wrappers
@pytest.mark.parametrize("install", [False, True], ids=["with", "install"])
def test_accumulate(wrap: Callable[[Any], Any], install: bool) -> None:
    assert_equal(accumulated(wrap, install), accumulated(lambda optimizer: optimizer, install))


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, faststep.amp.GradScaler])
def test_accumulate_where_accelerate_scales(scaler_class: Any) -> None:
    """Its scaler and the window divide in the same step; a power of two costs no bit."""

    def scaled(optimizer: Any) -> Any:
        return AcceleratedOptimizer(optimizer, scaler_class("cpu", init_scale=16.0))

    model = model_of()
    optimizer = scaled(AdamW(model.parameters(), lr=0.1))
    accum = faststep.accumulate(optimizer, 2, model=model)
    for number in range(6):
        with accum:
            accum.backward(optimizer.scaler.scale(loss_of(model, number)))
        if accum.ready:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(weights(model), accumulated(lambda optimizer: optimizer, False))


@over_wrappers
def test_release(wrap: Callable[[Any], Any]) -> None:
    results = []
    for how in (wrap, lambda optimizer: optimizer):
        model = model_of()
        optimizer = how(AdamW(model.parameters(), lr=0.1))
        release = faststep.release_gradients(model, optimizer)
        for number in range(3):
            loss_of(model, number).backward()
            assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        release.remove()
        results.append(weights(model))
    assert_equal(*results)


def test_what_accelerate_does_itself_is_refused() -> None:
    model = model_of()
    inner = AdamW(model.parameters(), lr=0.1)
    for call in (
        lambda optimizer: faststep.accumulate(optimizer, 2, model=model),
        lambda optimizer: faststep.release_gradients(model, optimizer),
    ):
        with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
            call(AcceleratedOptimizer(inner, num_steps=4))
        with pytest.raises(TypeError, match="around a object, which is no torch"):
            call(AcceleratedOptimizer(object()))
    scaled = AcceleratedOptimizer(inner, torch.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match="AcceleratedOptimizer steps with a GradScaler"):
        faststep.release_gradients(model, scaled)
    faststep.release_gradients(model, inner).remove()  # nothing of all that has left a trace


@pytest.mark.parametrize("wrap", [LightningOptimizer, real_fabric], ids=["replica", "Fabric"])
def test_lightnings_wrapper_is_refused(wrap: Callable[[Any], Any]) -> None:
    """Its zero_grad is torch's, on the wrapper: nobody inside learns of it."""
    model = model_of()
    optimizer = wrap(AdamW(model.parameters(), lr=0.1))
    for call in (
        lambda optimizer: faststep.accumulate(optimizer, 2, model=model).remove(),
        lambda optimizer: faststep.release_gradients(model, optimizer).remove(),
    ):
        with pytest.raises(TypeError, match=r"has wrapped: pass its attribute \.optimizer"):
            call(optimizer)
        call(optimizer.optimizer)


def test_two_wrappers_of_one_optimizer() -> None:
    model = model_of()
    inner = AdamW(model.parameters(), lr=0.1)
    accum = faststep.accumulate(AcceleratedOptimizer(inner), 2)
    with pytest.raises(RuntimeError, match="accumulated already"):
        faststep.accumulate(AcceleratedOptimizer(inner), 2)
    accum.remove()
