"""Step hooks, state_dict hooks, closures and the wrapping of `step`, as torch.optim has them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from faststep import _C
from faststep._torch.library import address_of

from .common import assert_same_bits, parameters, set_gradients
from .declarations import ALL, Declaration

over_all = pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)


def make(declaration: Declaration, **kwargs: Any) -> torch.optim.Optimizer:
    params = parameters((7,), (2, 3))
    set_gradients(params, 0)
    return declaration.ours(params, **{**declaration.kwargs, **kwargs})


def values(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in optimizer.param_groups[0]["params"]]


@over_all
def test_order_of_step_hooks(declaration: Declaration) -> None:
    """Global pre, own pre, the step itself, own post, global post."""
    optimizer, seen = make(declaration), []
    before = values(optimizer)

    def log(name: str) -> Any:
        def hook(instance: Any, args: Any, kwargs: Any) -> None:
            assert instance is optimizer
            moved = not torch.equal(values(optimizer)[0], before[0])
            seen.append((name, moved))

        return hook

    handles = [
        optimizer.register_step_post_hook(log("own post")),
        register_optimizer_step_post_hook(log("global post")),
        optimizer.register_step_pre_hook(log("own pre")),
        register_optimizer_step_pre_hook(log("global pre")),
    ]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [
        ("global pre", False),
        ("own pre", False),
        ("own post", True),
        ("global post", True),
    ]
    optimizer.step()
    assert len(seen) == 4, "a removed hook must not be called"


@over_all
def test_pre_hook_that_returns_nonsense(declaration: Declaration) -> None:
    optimizer = make(declaration)
    before = values(optimizer)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: 5)
    with pytest.raises(RuntimeError, match=r"must return None or a tuple of .* but got 5\."):
        optimizer.step()
    assert_same_bits(values(optimizer), before)


@over_all
def test_pre_hook_sees_and_changes_gradients(declaration: Declaration) -> None:
    """A hook that replaces gradients just before the step is not bypassed by a cached plan."""
    optimizer, expected = make(declaration), make(declaration)
    optimizer.step()
    expected.step()

    def flip(instance: Any, args: Any, kwargs: Any) -> None:
        for p in instance.param_groups[0]["params"]:
            p.grad = -p.grad

    optimizer.register_step_pre_hook(flip)
    optimizer.step()
    flip(expected, (), {})
    expected.step()
    assert_same_bits(values(optimizer), values(expected))


@over_all
def test_state_dict_hooks(declaration: Declaration) -> None:
    optimizer, seen = make(declaration), []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("first"), prepend=True)

    def add(o: Any, saved: dict[str, Any]) -> dict[str, Any]:
        seen.append("post")
        return {**saved, "note": 7}

    optimizer.register_state_dict_post_hook(add)
    saved = optimizer.state_dict()
    assert seen == ["first", "pre", "post"]
    assert saved["note"] == 7

    def halve_lr(o: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        groups = [{**g, "lr": g["lr"] / 2} for g in loaded["param_groups"]]
        return {**loaded, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(halve_lr)
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(f"loaded {o.param_groups[0]['lr']}")
    )
    optimizer.load_state_dict(saved)
    assert seen[-1] == f"loaded {declaration.kwargs['lr'] / 2}"


@over_all
def test_step_is_wrapped_once_per_class(declaration: Declaration) -> None:
    """`hooked` tells torch and frameworks that the class attribute `step` runs the hooks."""
    make(declaration)
    wrapped = declaration.ours.step
    assert wrapped.hooked is True
    make(declaration)
    assert declaration.ours.step is wrapped
    assert "step" not in vars(make(declaration)), "step must not be an attribute of the instance"
    assert vars(declaration.ours)["step"] is wrapped, "each class wraps its own step"
    assert not getattr(inspect.unwrap(wrapped), "hooked", False)
    calls: list[int] = []
    optimizer = make(declaration)
    optimizer.register_step_pre_hook(lambda *a: calls.append(1))
    optimizer.step()
    assert calls == [1], "hooks run once per step"


@over_all
def test_profiler_sees_the_step(declaration: Declaration) -> None:
    optimizer = make(declaration)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.zero_grad()
    names = {event.key for event in profile.key_averages()}
    assert f"Optimizer.step#{declaration.name}.step" in names
    assert f"Optimizer.zero_grad#{declaration.name}.zero_grad" in names


def test_observers_see_the_step(tmp_path: Path) -> None:
    """Those that are no profilers too: what nobody listens to is left out."""
    optimizer = make(ALL[0])
    optimizer.step()
    assert not _C.is_recorded()
    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(tmp_path / "trace.json"))
    observer.start()
    assert _C.is_recorded()
    optimizer.step()
    observer.stop()
    observer.unregister_callback()
    assert not _C.is_recorded()
    name = f"Optimizer.step#{ALL[0].name}.step"
    assert (tmp_path / "trace.json").read_text().count(f'"{name}"') == 1


@pytest.mark.parametrize("watcher", ["nobody", "hook", "global hook", "libtorch does not tell"])
def test_what_torch_does_around_a_step_is_left_out(
    watcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it would show nobody anything, and only there."""
    optimizer, begun, kept = make(ALL[0]), [], []
    original = torch.autograd.profiler.record_function

    def begin(name: str) -> Any:
        begun.append(name)
        return original(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", begin)
    if watcher == "hook":
        optimizer.register_step_post_hook(lambda *args: kept.append(args))
    elif watcher == "global hook":
        handle = register_optimizer_step_pre_hook(lambda *args: kept.append(args))
    elif watcher == "libtorch does not tell":
        _C.use_callbacks(0)
    try:
        optimizer.step()
    finally:
        _C.use_callbacks(address_of("has_callbacks"))
        if watcher == "global hook":
            handle.remove()
    assert len(begun) == (watcher != "nobody")
    assert kept == ([(optimizer, (optimizer,), {})] if "hook" in watcher else [])


@over_all
def test_closure_runs_with_gradients_enabled(declaration: Declaration) -> None:
    params = parameters((4,))
    optimizer = declaration.ours(params, **declaration.kwargs)

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (params[0] * params[0]).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        start = params[0].detach().clone()
        loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(start.square().sum().item())
    assert not torch.equal(params[0], start)
    assert params[0].is_leaf
    assert params[0].requires_grad


@over_all
def test_step_restores_the_grad_mode(declaration: Declaration) -> None:
    optimizer = make(declaration)
    optimizer.step()
    assert torch.is_grad_enabled()
    with torch.inference_mode(False), torch.no_grad():
        optimizer.step()
        assert not torch.is_grad_enabled()
    optimizer.register_step_pre_hook(lambda *a: 5)
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert torch.is_grad_enabled()
