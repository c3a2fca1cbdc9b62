"""Steps in backward that are like the one before, which never run Python code.

Each test first makes some of them, and then changes one thing: the next step must be what it would
have been without them.
"""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from faststep import _C
from faststep.release.updates import Release

from .common import assert_equal, batches, loss_of, make_model, values
from .test_release import MAKE, states

DATA = batches([4] * 8)
WARM = 4  # the first makes the states, the second has them bound, the third knows no "first" step


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the gradients that are left to Python."""
    count, real = [0], Release.hooked

    def hooked(self: Release, param: Tensor) -> None:
        count[0] += 1
        real(self, param)

    monkeypatch.setattr(Release, "hooked", hooked)
    return count


def warm(make: Any, **options: Any) -> tuple[nn.Module, Any, Release]:
    model = make_model()
    groups = [{"params": model[:2].parameters()}, {"params": model[2:].parameters()}]
    optimizer = make(groups)
    release = faststep.release_gradients(model, optimizer, **options)
    for batch in DATA[:WARM]:
        loss_of(model, batch).backward()
        optimizer.step()
    return model, optimizer, release


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_python_sees_one_gradient_per_group(make: Any, calls: list[int]) -> None:
    model, optimizer, release = warm(make)
    versions = [p._version for p in model.parameters()]
    calls[0] = 0
    loss_of(model, DATA[WARM]).backward()
    assert calls[0] == 2
    assert all(p.grad is None for p in model.parameters())
    assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))
    optimizer.step()
    release.remove()


@pytest.mark.parametrize("limit", [1, 500, 1 << 20])
def test_parameters_on_a_device_wait(
    limit: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here of parameters that only say that they lie there; with the bits of a step afterwards."""
    monkeypatch.setattr(nn.Parameter, "is_cuda", True)
    monkeypatch.setattr("faststep.release.updates._TOGETHER", limit)
    make = functools.partial(faststep.optim.AdamW, lr=1e-2)
    model, optimizer, release = warm(make)
    other = make_model()
    plain = make([{"params": other[:2].parameters()}, {"params": other[2:].parameters()}])
    for batch in DATA[:WARM]:
        loss_of(other, batch).backward()
        plain.step()
        plain.zero_grad()
    for batch in DATA[WARM:]:
        calls[0] = 0
        loss_of(model, batch).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        loss_of(other, batch).backward()
        plain.step()
        plain.zero_grad()
        assert_equal(values(model), values(other))
        assert_equal(states(optimizer), states(plain))
        assert calls[0] == {1: 6, 500: 3, 1 << 20: 2}[limit]
    assert not release._waiting
    assert release._waiting_bytes == [0]
    release.remove()


@pytest.mark.parametrize("clip", ["per_parameter", "lagged"])
def test_clipping_without_python_has_the_same_bits(clip: str, calls: list[int]) -> None:
    """Also for limits of 0 and above all norms, and where one is changed between steps."""
    seen = []
    for plain in (True, False):
        model, optimizer, release = warm(
            functools.partial(faststep.optim.AdamW, lr=1e-2, max_grad_norm=0.1), clip=clip
        )
        for place in release._places.entries():
            place.hook.plain = plain
        calls[0], norms = 0, []
        for batch, limit in zip(DATA[WARM:], (0.1, 0.0, 1e9, 0.01), strict=True):
            optimizer.max_grad_norm = limit
            loss_of(model, batch).backward()
            optimizer.step()
            norms.append(optimizer.last_grad_norm)
        assert calls[0] == (2 if plain else 6) * 4
        seen.append((values(model), states(optimizer), norms))
        release.remove()
    assert_equal(seen[0][0], seen[1][0])
    assert_equal(seen[0][1], seen[1][1])
    assert str(seen[0][2]) == str(seen[1][2])


def test_without_records_python_sees_all(calls: list[int]) -> None:
    _C.use_records()
    try:
        model, _, release = warm(MAKE["AdamW"])
        calls[0] = 0
        loss_of(model, DATA[WARM]).backward()
    finally:
        _C.use_records(*faststep._layout)
    assert calls[0] == 6
    release.remove()


def _lr(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[1]["lr"] = 0.5


def _group(model: nn.Module, optimizer: Any) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())
    second["lr"] = 0.5


def _left_out(model: nn.Module, optimizer: Any) -> None:
    optimizer.state.pop(optimizer.param_groups[1]["params"].pop(0))


def _state(model: nn.Module, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _moment(model: nn.Module, optimizer: Any) -> None:
    entry = optimizer.state[model[4].weight]
    entry["exp_avg"] = torch.ones_like(entry["exp_avg"])


def _amsgrad(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["amsgrad"] = True
    for state in optimizer.state.values():  # as in torch the user has to make them
        state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()


def _data(model: nn.Module, optimizer: Any) -> None:
    model[4].weight.data = model[4].weight.data.clone().t().contiguous().t()


@pytest.mark.parametrize("change", [_lr, _group, _left_out, _state, _moment, _amsgrad, _data])
def test_what_changes_between_steps_is_seen(change: Callable[..., None]) -> None:
    results = []
    for released in (True, False):
        model, optimizer, release = warm(MAKE["AdamW"])
        if not released:
            release.remove()
        change(model, optimizer)
        for batch in DATA[WARM:]:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(values(model) + states(optimizer))
        release.remove()
    assert_equal(*results)


def test_what_is_refused_is_refused_in_the_middle_of_a_step() -> None:
    """After the first gradient of each group, which has made the rules."""
    model, optimizer, release = warm(MAKE["SGD"])
    change = functools.partial(setattr, optimizer, "max_grad_norm", 1.0)
    handle = model[4].weight.register_hook(lambda _: change())
    with pytest.raises(ValueError, match="needs all gradients before the first update"):
        loss_of(model, DATA[0]).backward()
    handle.remove()
    release.remove()
    model, optimizer, release = warm(MAKE["SGD"])
    loss_of(model, DATA[0]).backward()
    before = values(model)
    with pytest.raises(RuntimeError, match="a second gradient of parameter 3 of group 1"):
        loss_of(model, DATA[0]).backward()
    assert_equal(values(model), before)
    release.remove()


def test_a_gradient_that_was_taken_away_or_replaced(calls: list[int]) -> None:
    """By a hook of the user's that runs before."""
    model, optimizer = make_model(), None
    weight = model[0].weight

    def hook(param: Tensor) -> None:
        param.grad = hook.value  # type: ignore[attr-defined]

    weight.register_post_accumulate_grad_hook(hook)
    hook.value = None  # type: ignore[attr-defined]
    optimizer = MAKE["SGD"](model.parameters())
    release = faststep.release_gradients(model, optimizer)
    before = weight.detach().clone()
    for batch in DATA[:WARM]:
        loss_of(model, batch).backward()
        optimizer.step()
    assert torch.equal(weight, before)
    hook.value = torch.ones_like(weight).to_sparse()  # type: ignore[attr-defined]
    loss_of(model, DATA[0]).backward()  # torch's class makes a sparse step
    assert not torch.equal(weight, before)
    release.remove()


def test_nothing_is_held(calls: list[int]) -> None:
    """In the middle of a step, without remove(): reference counts alone free everything."""
    gc.collect()
    gc.disable()
    try:
        model, optimizer, release = warm(MAKE["AdamW"])
        loss_of(model, DATA[0]).backward()
        dead = [weakref.ref(x) for x in (optimizer, release, model, *model.parameters())]
        hooks = [weakref.ref(known.handle) for known in release._places._known.values()]
        del model, optimizer, release
        # torch's optimizers are in a cycle of their own (zero_grad is wrapped around itself)
        gc.collect()
    finally:
        gc.enable()
    assert not [ref() for ref in (*dead, *hooks) if ref() is not None]


def test_misuse() -> None:
    release = faststep.optim.SGD([torch.ones(2, requires_grad=True)])
    optimizer = weakref.ref(release)
    for arguments in ((), (print,), (print, 5, {}), (5, optimizer, {}), (print, optimizer, [])):
        with pytest.raises(TypeError):
            _C.ReleaseHook(*arguments)
    with pytest.raises(TypeError, match="no keyword arguments"):
        _C.ReleaseHook(print, optimizer, {}, plain=True)
    seen: list[Any] = []
    hook = _C.ReleaseHook(seen.append, optimizer, {})
    hook.plain, hook.group = True, 0
    hook(5)
    assert seen == [5]
    with pytest.raises(TypeError):
        hook()
    with pytest.raises(TypeError, match="no keyword arguments"):
        hook(5, param=5)
    with pytest.raises(AttributeError):
        hook.plan = None
