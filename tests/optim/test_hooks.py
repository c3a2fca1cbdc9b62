"""The wrapping of `step`, and who sees it; tests/oracle compares hooks and closures."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from faststep import _C
from faststep._torch.library import address_of

from .common import parameters, set_gradients
from .declarations import ALL, Declaration

over_all = pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)


def make(declaration: Declaration, **kwargs: Any) -> torch.optim.Optimizer:
    params = parameters((7,), (2, 3))
    set_gradients(params, 0)
    return declaration.ours(params, **{**declaration.kwargs, **kwargs})


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
