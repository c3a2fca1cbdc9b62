"""offload(): the bits of the step without it, whatever is stored, clipped, scaled or added up."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from faststep.amp import GradScaler
from optim.declarations import ALL, OTHERS, Declaration

from .common import Make, assert_same, train

HOW: tuple[dict[str, Any], ...] = (
    {"threads": 3},
    {"fraction": 0.5, "wait_in_forward": True},
)


def check(make: Make, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Every way to offload leaves what the step without offload does."""
    expected = train(make, None, dtype, **options)
    for how in HOW:
        assert_same(train(make, how, dtype, **options), expected)


def adamw(**options: Any) -> Make:
    return functools.partial(faststep.optim.AdamW, lr=0.01, betas=(0.9, 0.95), **options)


FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp64": (torch.float64, {}),
    "bf16": (torch.bfloat16, {}),
    "fp16, masters": (torch.float16, {"master_weights": True}),
    "masters": (torch.bfloat16, {"master_weights": True}),
    "remainders": (torch.bfloat16, {"master_weights": "remainder16"}),
    "bf16 states": (torch.float32, {"state_dtype": "bf16"}),
    "int8 states": (torch.float32, {"state_dtype": "int8"}),
    "few bits": (torch.bfloat16, {"master_weights": "remainder16", "state_dtype": "int8"}),
    "noise": (torch.bfloat16, {"state_dtype": "bf16", "rounding": "stochastic"}),
}


@pytest.mark.parametrize(
    ("stored", "max_norm"),
    [*((name, 0.05) for name in FORMATS), ("fp32", None), ("few bits", None)],
)
def test_formats(stored: str, max_norm: float | None) -> None:
    dtype, options = FORMATS[stored]
    check(adamw(max_grad_norm=max_norm, **options), dtype, keep=True, steps=3)


@pytest.mark.parametrize("how", [{}, {"fraction": 0.0}, {"wait_in_forward": True}])
def test_ways(how: dict[str, Any]) -> None:
    make = adamw(max_grad_norm=0.05)
    assert_same(train(make, how), train(make, None))


@pytest.mark.parametrize("declaration", [*ALL, *OTHERS], ids=lambda d: d.name)
def test_optimizers(declaration: Declaration) -> None:
    make = functools.partial(declaration.ours, **declaration.kwargs)
    expected = train(make, None, steps=3)
    for how in ({"fraction": 0.5}, {"in_backward": True}):
        assert_same(train(make, how, steps=3), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulation(dtype: torch.dtype) -> None:
    check(adamw(max_grad_norm=0.05), dtype, micro_steps=3)


def clipped_by_torch(optimizer: Any, model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def clipped_by_us(optimizer: Any, model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    faststep.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def clipped_by_value(optimizer: Any, model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    optimizer.step()


def with_closure(optimizer: Any, model: nn.Module, loss: Tensor) -> None:
    def closure() -> Tensor:
        loss.backward()
        return loss

    optimizer.step(closure)


def written(optimizer: Any, model: nn.Module, loss: Tensor) -> None:
    """Parameters and gradients that a script writes, and exchanges."""
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.99)
            if param.grad is not None:
                param.grad.mul_(0.5)
    optimizer.step()
    model.inner.weight.data = model.inner.weight.data * 1.01
    model.inner.weight.grad = torch.ones_like(model.inner.weight)
    model.last.grad = None
    optimizer.step()


CLIPS: dict[str, Any] = {"max_grad_norm": 0.01, "keep_grads": True}


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (clipped_by_torch, {}),
        (clipped_by_us, CLIPS),
        (clipped_by_value, {}),
        (with_closure, CLIPS),
        (written, {}),
        (written, CLIPS),
    ],
)
def test_loops(step: Any, options: dict[str, Any]) -> None:
    check(adamw(**options), step=step, keep=True)


class Scaled:
    """A loop with a scaler, of whose steps one overflows."""

    def __init__(self, scaler: Any, unscales: bool, **options: Any) -> None:
        self.scaler, self.unscales, self.options, self.steps = scaler, unscales, options, 0

    def __call__(self, optimizer: Any, model: nn.Module, loss: Tensor) -> None:
        scaler = self.scaler
        scaler.scale(loss).backward()
        self.steps += 1
        if self.steps == 2:
            assert model.turned.grad is not None
            model.turned.grad[3, 3] = float("inf")
        if self.unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer, **self.options)
        scaler.update()


@pytest.mark.parametrize(
    ("kind", "unscales", "options", "dtype"),
    [
        (GradScaler, False, {}, torch.bfloat16),
        (GradScaler, False, {"max_grad_norm": 0.05}, torch.float32),
        (GradScaler, True, {"fused": True}, torch.float32),
        (torch.amp.GradScaler, False, {}, torch.bfloat16),
        (torch.amp.GradScaler, False, {"fused": True}, torch.bfloat16),
        (torch.amp.GradScaler, True, {"max_grad_norm": 0.05}, torch.bfloat16),
        (torch.amp.GradScaler, True, {}, torch.float32),
    ],
)
def test_scalers(kind: Any, unscales: bool, options: dict[str, Any], dtype: torch.dtype) -> None:
    def run(offload: dict[str, Any] | None) -> list[Any]:
        scaler = kind("cpu", 1000.0, 1.7, growth_interval=1)
        step = Scaled(scaler, unscales)
        kept: dict[str, Any] = {"keep": True, "notes_skips": kind is GradScaler}
        found = train(adamw(**options), offload, dtype, step=step, **kept)
        return [*found, scaler.get_scale()]

    expected = run(None)
    for how in HOW:
        assert_same(run(how), expected)


def test_the_scalers_limit() -> None:
    for how in HOW:
        runs = []
        for offload in (how, None):
            step = Scaled(GradScaler("cpu", 512.0), False, max_norm=0.05)
            runs.append(train(adamw(), offload, torch.bfloat16, step=step))
        assert_same(*runs)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_accumulate(dtype: torch.dtype | None) -> None:
    """Windows of faststep.accumulate, also with fp32 sums of bf16 gradients."""

    def make(groups: Any) -> Any:
        optimizer = adamw(max_grad_norm=0.05)(groups)
        windows.append(faststep.accumulate(optimizer, 2, dtype=dtype))
        return optimizer

    def step(optimizer: Any, model: nn.Module, loss: Tensor) -> None:
        with windows[-1]:
            windows[-1].backward(loss)
        if windows[-1].ready:
            optimizer.step()
            optimizer.zero_grad()

    windows: list[Any] = []
    check(make, torch.bfloat16, step=step, holds_grads=True)
