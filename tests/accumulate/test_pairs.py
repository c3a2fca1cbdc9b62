"""in_pairs=True: two gradients are added to an fp32 sum at a time, with the bits of one by one."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import faststep

from .common import (
    assert_equal,
    batches,
    finish,
    grads,
    loss_of,
    make_model,
    micro_steps,
    values,
)
from .test_sums import sums_by_hand

LOW = torch.bfloat16
Accumulation = faststep.accumulation.Accumulation
WINDOW = batches([4] * 8, 0, LOW)


def accumulate(optimizer: Any, steps: int, in_pairs: bool = True, **kwargs: Any) -> Accumulation:
    return faststep.accumulate(optimizer, steps, dtype=torch.float32, in_pairs=in_pairs, **kwargs)


def assert_alike(run: Callable[[bool], list[Any]]) -> None:
    """What a run finds is the same with and without pairs."""
    plain, in_pairs = run(False), run(True)
    assert any(found is not None for found in plain)
    assert_equal(plain, in_pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_the_bits_of_a_hand_written_sum(steps: int, dtype: torch.dtype) -> None:
    """Full windows and short ones, which flush() completes."""
    model, reference = make_model(dtype), make_model(dtype)
    optimizer = faststep.optim.AdamW(model.parameters())
    accum = accumulate(optimizer, steps)
    for seed, count in enumerate((steps, steps, max(steps - 1, 1), steps // 2 or 1, steps)):
        window = batches([4] * count, seed, dtype)
        for batch in window:
            with accum:
                accum.backward(loss_of(model, batch))
            assert accum.ready or all(p.grad is None for p in model.parameters())
        assert accum.ready or accum.flush()
        assert_equal(grads(model), sums_by_hand(reference, window))
        finish(optimizer)
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                theirs.copy_(mine)


def test_half_the_passes() -> None:
    """Each moves the version of the sum."""
    passes = {}
    for in_pairs in (False, True):
        param = nn.Parameter(torch.ones(5, dtype=LOW))
        accum = accumulate(faststep.optim.SGD([param]), 8, in_pairs)
        for factor in range(8):
            with accum:
                accum.backward((param * factor).sum())
        assert param.grad.tolist() == [28.0] * 5
        passes[in_pairs] = param.grad._version
    assert passes == {False: 8, True: 4}


class Parts(nn.Module):
    """Parameters of which each forward uses some: one of fp32, one frozen, one twice."""

    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(3)
        for name in ("first", "second", "twice", "frozen"):
            drawn = torch.randn(300, generator=source).to(LOW)
            self.register_parameter(name, nn.Parameter(drawn))
        self.wide = nn.Parameter(torch.randn(300, generator=source))
        self.frozen.requires_grad_(False)

    def forward(self, uses: str, x: Tensor) -> Tensor:
        total = (self.wide * x).sum() if "w" in uses else x.sum() * self.first.sum() * 0.0
        for letter, param in (("1", self.first), ("2", self.second), ("t", self.twice)):
            if letter in uses:
                total = total + (param * x.to(LOW) * self.frozen).float().sum().cos()
        if "t" in uses:  # once more, in a backward pass of its own
            start = x.to(LOW).requires_grad_()
            again = checkpoint(lambda y: (y * self.twice).float().sin(), start, use_reentrant=True)
            total = total + again.sum()
        return total


USES = (
    *("12tw 12tw 12tw 12tw", "1 2 t w", "1t 12 1 1t", "w w w 1", "1 1 12 w", "t tw 2 tt"),
    *("2 w w w", "w 2 w 2", "1t w w t"),
)


@pytest.mark.parametrize("uses", USES)
def test_parameters_that_are_not_always_used(uses: str) -> None:
    def run(in_pairs: bool) -> list[Any]:
        model, found = Parts(), []
        optimizer = faststep.optim.AdamW(model.parameters(), max_grad_norm=0.5)
        accum = accumulate(optimizer, 4, in_pairs, model=model)
        for window in range(3):
            if window == 1:
                model.frozen.requires_grad_(True)
            for index, some in enumerate(uses.split(" ")):
                with accum:
                    accum.backward(model(some, torch.randn(300, generator=seed(index))))
            found += grads(model)
            finish(optimizer)
            found += values(model)
        return found

    def seed(index: int) -> torch.Generator:
        return torch.Generator().manual_seed(index)

    assert_alike(run)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_parameter_reached_several_times_in_a_backward(reentrant: bool) -> None:
    """Reentrant checkpointing hands over a gradient each time; windows of odd and even length."""

    def run(in_pairs: bool) -> list[Any]:
        model, found = make_model(LOW), []
        inner = model[:2]
        optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
        accum = accumulate(optimizer, 3, in_pairs)
        for batch in WINDOW:
            with accum:
                x = batch[0].requires_grad_()
                for _ in range(3):
                    x = x + checkpoint(inner, x, use_reentrant=reentrant)[:, :6]
                accum.backward(loss_of(model, (x, batch[1])))
            if accum.ready:
                found += grads(model)
                finish(optimizer)
        return [*found, *values(model)]

    assert_alike(run)


@pytest.mark.parametrize("overflow", [None, 0, 1, 2, 3, 4])
def test_with_a_scaler(overflow: int | None) -> None:
    """An infinity in the first or in the second of a pair, or alone, drops the window."""

    def run(in_pairs: bool) -> list[Any]:
        model, found = make_model(torch.float16), []
        optimizer = faststep.optim.AdamW(model.parameters())
        scaler = faststep.amp.GradScaler("cpu", init_scale=64.0)
        accum = accumulate(optimizer, 5, in_pairs)
        for window in range(2):
            for index, batch in enumerate(batches([4] * 5, window, torch.float16)):
                with accum:
                    factor = math.inf if (window, index) == (0, overflow) else 1.0
                    scaler.scale(loss_of(model, batch) * factor).backward()
            scaler.step(optimizer, max_norm=0.3)
            scaler.update()
            optimizer.zero_grad()
            found += values(model)
        assert not accum.flush()
        assert accum.discarded == int(overflow is not None)
        return [*found, torch.tensor(scaler.get_scale())]

    assert_alike(run)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_installed(set_to_none: bool, clips: bool) -> None:
    """An unchanged loop; where it unscales, clipping finds gradients at a window's end only."""

    def run(in_pairs: bool) -> list[Any]:
        model, norms = make_model(LOW), []
        optimizer = faststep.optim.AdamW(model.parameters())
        scaler = faststep.amp.GradScaler("cpu", init_scale=64.0)
        accum = accumulate(optimizer, 3, in_pairs).install(scaler=scaler)
        for batch in WINDOW:
            scaler.scale(loss_of(model, batch)).backward()
            if clips:
                scaler.unscale_(optimizer)
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
        if not clips:
            assert accum.flush()
        return [*norms, *values(model)]

    assert_alike(run)


@pytest.mark.parametrize("loaded_in_pairs", [False, True])
@pytest.mark.parametrize("saved_in_pairs", [False, True])
@pytest.mark.parametrize("at", range(6))
def test_a_state_inside_a_window(at: int, saved_in_pairs: bool, loaded_in_pairs: bool) -> None:
    """It is one sum per parameter, and goes on either way; the run that was saved goes on too."""

    def start(in_pairs: bool) -> tuple[nn.Module, Accumulation]:
        model = make_model(LOW)
        return model, accumulate(faststep.optim.SGD(model.parameters()), 6, in_pairs)

    def go_on(model: nn.Module, accum: Accumulation, window: list) -> None:
        micro_steps(accum, model, window)

    first, second = start(saved_in_pairs), start(loaded_in_pairs)
    go_on(*first, WINDOW[:at])
    second[1].load_state_dict(first[1].state_dict())
    for one in (first, second):
        go_on(*one, WINDOW[at:6])
        assert one[1].ready
        assert_equal(grads(one[0]), sums_by_hand(make_model(LOW), WINDOW[:6]))


def test_gradients_that_several_parameters_share() -> None:
    """One tensor for two parameters, an expanded one, and one that a tensor hook keeps."""

    def run(in_pairs: bool) -> list[Any]:
        x, y, z = (nn.Parameter(torch.zeros(40, dtype=LOW)) for _ in range(3))
        kept = []
        z.register_hook(kept.append)
        accum = accumulate(faststep.optim.SGD([x, y, z]), 4, in_pairs)
        for index in range(4):
            factor = torch.randn(40, generator=torch.Generator().manual_seed(index)).to(LOW)
            with accum:
                accum.backward(((x + y) * factor).sum() + x.sum() + (z * factor).sum())
            kept[-1].zero_()
        return [x.grad, y.grad, z.grad]

    assert_alike(run)


def test_several_parameters_with_the_same_gradient() -> None:
    """As set by hand; it is in no sum twice, and none is changed."""
    params = [nn.Parameter(torch.zeros(4, dtype=LOW)) for _ in range(2)]
    accum = accumulate(faststep.optim.SGD(params), 3)
    grad = torch.ones(1, dtype=LOW).expand(4)
    for _ in range(3):
        with accum:
            for param in params:
                param.grad = grad
    assert [param.grad.tolist() for param in params] == [[3.0] * 4] * 2
    assert grad.tolist() == [1.0] * 4
