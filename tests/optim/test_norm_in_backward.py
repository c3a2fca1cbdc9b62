"""norm_in_backward=True: the bits of the two-pass step, from gradients read once."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from faststep import _C

from .common import assert_same_bits, state_tensors

MAKE: dict[str, Callable[..., Any]] = {
    "AdamW": lambda ps, **kw: faststep.optim.AdamW(ps, lr=0.01, eps=1e-3, **kw),
    "Adam": lambda ps, **kw: faststep.optim.Adam(ps, lr=0.01, eps=1e-3, amsgrad=True, **kw),
    "SGD": lambda ps, **kw: faststep.optim.SGD(ps, lr=0.1, momentum=0.9, **kw),
    "Lion": lambda ps, **kw: faststep.optim.Lion(ps, lr=0.01, **kw),
}
over_optimizers = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


class Odd(nn.Module):
    """Chunks that end anywhere, a transposed parameter, one without elements, an unused one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(1)
        self.large = nn.Parameter(torch.randn(41000, generator=source).to(dtype) * 0.01)
        self.turned = nn.Parameter((torch.randn(7, 300, generator=source).to(dtype) * 0.1).t())
        self.scalar = nn.Parameter(torch.ones((), dtype=dtype))
        self.empty = nn.Parameter(torch.zeros(0, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.large.dtype)
        a = (self.large * x.repeat(137)[:41000]).float().square().sum()
        return a * self.scalar.float() + (x @ self.turned).float().cos().sum() + self.empty.sum()


def inputs(steps: int = 4) -> list[Tensor]:
    source = torch.Generator().manual_seed(7)
    return [torch.randn(300, generator=source) * 3.0 for _ in range(steps)]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    large, *rest = model.parameters()
    return [{"params": [large]}, {"params": rest, "lr": 0.003}]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [*(p.detach().clone() for p in model.parameters()), *state_tensors(optimizer)]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whether each step was given what the hooks measured."""
    seen: list[int] = []
    step = faststep.grads.norm.BackwardNorm.for_step

    def spy(self: Any, *args: Any) -> Any:
        result = step(self, *args)
        seen.append(result is not None)
        return result

    monkeypatch.setattr(faststep.grads.norm.BackwardNorm, "for_step", spy)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@over_optimizers
def test_the_bits_of_the_two_pass_step(make: Any, dtype: torch.dtype, measured: list[int]) -> None:
    found = []
    for hooked in (True, False):
        model = Odd(dtype)
        optimizer = make(groups(model), max_grad_norm=0.3, norm_in_backward=hooked)
        norms = []
        for x in inputs():
            model(x).backward()
            optimizer.step()
            norms.append(optimizer.last_grad_norm)
            optimizer.zero_grad()
        assert all(float(norm) > 0.3 for norm in norms)
        assert optimizer.norm_fallbacks == {}
        found.append(everything(model, optimizer) + norms)
    assert_same_bits(*found)
    assert measured == [True] * 4


@pytest.mark.parametrize("scale", [8.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_under_a_scaler(scale: float, dtype: torch.dtype, measured: list[int]) -> None:
    """Bits, an overflow that is found, and one pass of its own for each new scale."""
    found = []
    for hooked in (True, False):
        model = Odd(dtype)
        optimizer = MAKE["AdamW"](model.parameters(), norm_in_backward=hooked)
        scaler = faststep.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        skipped = []
        for number, x in enumerate(inputs(9)):
            loss = model(x) * (torch.inf if number == 5 else 1e-4)
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1e-4)
            skipped.append(optimizer.step_was_skipped)
            scaler.update()
            optimizer.zero_grad()
        assert skipped == [number == 5 for number in range(9)]
        found.append([*everything(model, optimizer), torch.tensor(scaler.get_scale())])
        # At first, after three steps, and after the overflow.
        assert optimizer.norm_fallbacks == ({"scale": 3} if hooked else {})
    assert_same_bits(*found)
    assert measured == [False, True, True, False, True, True, False, True, True]


def change_in_place(model: Odd) -> None:
    model.turned.grad.mul_(3.0)


def replace(model: Odd) -> None:
    model.turned.grad = model.turned.grad * 3.0


def replace_twice(model: Odd) -> None:
    model.turned.grad = model.turned.grad * 3.0
    model.turned.grad = model.turned.grad * 2.0


def swap_memory(model: Odd) -> None:
    model.turned.grad.set_((model.turned.grad * 3.0).detach())


def set_first(model: Odd) -> None:
    model.unused.grad = torch.full((3,), 5.0)


def drop(model: Odd) -> None:
    model.large.grad = None


def clip_by_hand(model: Odd) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


CHANGES = [
    (change_in_place, "changed"),
    (replace, "changed"),
    (replace_twice, "changed"),
    (swap_memory, "changed"),
    (clip_by_hand, "changed"),
    (set_first, "unmeasured"),
    (drop, None),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=lambda c: getattr(c, "__name__", ""))
def test_a_gradient_changed_after_its_hook(change: Any, reason: str | None) -> None:
    found = []
    for hooked in (True, False):
        model = Odd()
        optimizer = MAKE["AdamW"](model.parameters(), max_grad_norm=0.3, norm_in_backward=hooked)
        for number, x in enumerate(inputs()):
            model(x).backward()
            if number in (1, 2):
                change(model)
            expected = number == 1 and hooked and reason is not None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            assert len(caught) == expected  # once, though it happens twice
            if expected:
                assert "norm_in_backward=True" in str(caught[0].message)
                assert caught[0].filename == __file__
            optimizer.zero_grad()
        assert optimizer.norm_fallbacks == ({reason: 2} if hooked and reason else {})
        found.append([*everything(model, optimizer), optimizer.last_grad_norm])
    assert_same_bits(*found)


def test_writes_without_a_sign_are_not_seen() -> None:
    """What the documentation says: the norm is then that of the gradient before the write."""
    param = nn.Parameter(torch.ones(4))
    optimizer = MAKE["SGD"]([param], max_grad_norm=1e9, norm_in_backward=True)
    param.sum().backward()
    param.grad.data.mul_(10.0)
    optimizer.step()
    assert float(optimizer.last_grad_norm) == 2.0
    assert optimizer.norm_fallbacks == {}


def test_the_last_backward_counts(measured: list[int]) -> None:
    """Gradients that autograd adds up over several backward passes."""
    found = []
    for hooked in (True, False):
        model = Odd()
        optimizer = MAKE["AdamW"](model.parameters(), max_grad_norm=0.3, norm_in_backward=hooked)
        for x in inputs():
            model(x).backward()
            model(2.0 * x).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        found.append([*everything(model, optimizer), optimizer.last_grad_norm])
    assert_same_bits(*found)
    # zero_grad leaves zeros where there was no gradient of backward in the step after the first
    assert measured == [True] * 4


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_accumulation_measures_in_the_last_micro_step(dtype: Any, measured: list[int]) -> None:
    found = []
    low = torch.float32 if dtype is None else torch.bfloat16
    for hooked in (True, False):
        model = Odd(low)
        optimizer = MAKE["AdamW"](model.parameters(), max_grad_norm=0.3, norm_in_backward=hooked)
        accum = faststep.accumulate(optimizer, 3, model=model, dtype=dtype)
        for number, x in enumerate(inputs(9)):
            with accum:
                accum.backward(model(x))
            if hooked and number % 3 < 2:  # measured nothing
                assert optimizer._backward_norm.idle
            if accum.ready:
                optimizer.step()
                optimizer.zero_grad()
        found.append([*everything(model, optimizer), optimizer.last_grad_norm])
        assert optimizer.norm_fallbacks == {}
        accum.remove()
    assert_same_bits(*found)
    assert measured == [True, True, True]


@pytest.mark.parametrize("scaled", [False, True])
def test_windows_of_tokens(scaled: bool, measured: list[int]) -> None:
    """Hooks know the divisor of a window whose tokens were counted before its last backward."""
    found = []
    counts = [3, 1, 7, 2, 2, 2, 5, 11, 1, 1, 1, 1]
    for hooked in (True, False):
        model = Odd()
        optimizer = MAKE["AdamW"](model.parameters(), max_grad_norm=0.3, norm_in_backward=hooked)
        accum = faststep.accumulate(optimizer, 3, normalize="tokens")
        scaler = faststep.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        for number, (x, count) in enumerate(zip(inputs(12), counts, strict=True)):
            with accum:
                if number < 9:
                    accum.add_count(count)
                scaler.scale(model(x)).backward()
                if number >= 9:  # too late
                    accum.add_count(count)
            if accum.ready:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        found.append([*everything(model, optimizer), optimizer.last_grad_norm])
        # The scaler's scale is known from the first step on; the last window has 2 in backward.
        assert optimizer.norm_fallbacks == ({"scale": 1 + scaled} if hooked else {})
    assert_same_bits(*found)
    assert measured == [not scaled, True, True, False]


def test_parameters_that_come_later(measured: list[int]) -> None:
    model = Odd()
    model.turned.requires_grad_(False)
    optimizer = MAKE["SGD"]([model.large], max_grad_norm=0.3, norm_in_backward=True)
    model(inputs()[0]).backward()
    optimizer.add_param_group({"params": [model.scalar, model.turned]})
    with pytest.warns(UserWarning, match="parameter 0 of group 1 was not measured"):
        optimizer.step()
    model.turned.requires_grad_(True)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs()[1]).backward()
        optimizer.step()
    assert measured == [False, False, True, True]
    assert optimizer.norm_fallbacks == {"unmeasured": 2}


def test_the_limit_may_come_and_go(measured: list[int]) -> None:
    """Hooks measure only for steps that use it."""
    model = Odd()
    optimizer = MAKE["SGD"](model.parameters(), norm_in_backward=True)
    limits = [None, 0.3, 0.3, None, 0.3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for limit in limits:
            optimizer.max_grad_norm = limit
            model(inputs()[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert measured == [False, False, True, False, False]
    assert optimizer.norm_fallbacks == {"unmeasured": 2}


def test_several_ranks_fall_back(monkeypatch: pytest.MonkeyPatch, measured: list[int]) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = Odd()
    optimizer = MAKE["SGD"](model.parameters(), max_grad_norm=0.3, norm_in_backward=True)
    model(inputs()[0]).backward()
    with pytest.warns(UserWarning, match="several ranks"):
        optimizer.step()
    assert optimizer.norm_fallbacks == {"distributed": 1}
    assert measured == [False]


def test_no_gradient_outlives_its_step() -> None:
    model = Odd()
    optimizer = MAKE["AdamW"](model.parameters(), max_grad_norm=0.3, norm_in_backward=True)
    model(inputs()[0]).backward()
    alive = weakref.ref(model.large.grad)
    optimizer.step()
    optimizer.zero_grad()
    assert alive() is None


@pytest.mark.parametrize("how", ["set to False", "dropped"])
def test_nothing_is_left(how: str) -> None:
    model = Odd()
    optimizer = MAKE["AdamW"](model.parameters(), max_grad_norm=0.3, norm_in_backward=True)
    assert all(p._post_accumulate_grad_hooks for p in model.parameters())
    model(inputs()[0]).backward()
    optimizer.step()
    dead = weakref.ref(optimizer._backward_norm)
    if how == "dropped":
        del optimizer
        gc.collect()
    else:
        optimizer.norm_in_backward = False
        assert optimizer.norm_in_backward is False
    assert dead() is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_copies_hook_their_own_parameters() -> None:
    model = Odd()
    optimizer = MAKE["AdamW"](model.parameters(), max_grad_norm=0.3, norm_in_backward=True)
    model, optimizer = copy.deepcopy((model, optimizer))
    assert optimizer.norm_in_backward
    for _ in range(3):
        model(inputs()[0]).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        optimizer.zero_grad()
    assert optimizer.norm_fallbacks == {"unmeasured": 1}


def test_a_closure_and_a_second_backward_inside_it(measured: list[int]) -> None:
    model = Odd()
    optimizer = MAKE["AdamW"](model.parameters(), max_grad_norm=0.3, norm_in_backward=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs()[0])
        loss.backward()
        return loss

    optimizer.step(closure)
    assert measured == [True]


def test_gradients_without_a_layout_of_their_own_are_the_steps_error() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = MAKE["AdamW"](table.parameters(), max_grad_norm=0.3, norm_in_backward=True)
    table(torch.tensor([1])).sum().backward()
    with (
        pytest.warns(UserWarning, match="was not measured"),
        pytest.raises(RuntimeError, match="sparse gradients"),
    ):
        optimizer.step()


def test_squares_refuse_what_they_do_not_know() -> None:
    squares = _C.Squares()
    with pytest.raises(TypeError, match="takes no arguments"):
        _C.Squares(1)
    with pytest.raises(ValueError, match="no slot -1"):
        squares.measure(-1, torch.ones(2))
    with pytest.raises(TypeError, match="group 0 is not a list"):
        squares.check([(1,)], None)
    with pytest.raises(TypeError, match="grad_scale"):
        squares.check([], torch.ones(2))
    with pytest.raises(TypeError, match="grad_scale is not a one-element tensor"):
        squares.expect(torch.ones(2))
    assert squares.measure(3, torch.ones(2)) is False


@pytest.mark.parametrize(
    ("grad", "moved", "adopted"),
    [
        (torch.ones(2), 0, True),
        (torch.ones(2), 1, False),
        (torch.ones(3), 0, False),
        (torch.ones(2, dtype=torch.float64), 0, False),
        (None, 0, False),
    ],
)
def test_squares_adopt_what_can_be_the_same_gradient(
    grad: Tensor | None, moved: int, adopted: bool
) -> None:
    squares, slot = _C.Squares(), 1
    param = nn.Parameter(torch.zeros(2))
    assert squares.adopt(slot, param, 0) is False
    assert squares.measure(slot, param, torch.full((2,), 5.0))
    if grad is not None:
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad
    assert squares.adopt(slot, param, (0 if grad is None else grad._version) + moved) is adopted
    changed = None if grad is None or adopted else ("changed", 0, 1)
    assert squares.check([[nn.Parameter(), param]], None) == changed
