"""Code of a script that runs before a step's update, and finds no gradients after a release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._torch.optim import step_pre_hooks
from ..optim.base import FusedOptimizer


def refuse_code_before_step(optimizer: FusedOptimizer, ours: Callable[..., Any] | None) -> None:
    """Raise for a hook before the step, but `ours`, and for a step that a script has replaced."""
    for hook in step_pre_hooks(optimizer):
        if hook is not ours:
            _refuse(f"the step pre-hook {_named(hook)}")
    if optimizer._has_replaced_step():
        kind = type(optimizer).__name__
        _refuse(f"the step of the script in place of {kind}.step, {_named(optimizer.step)},")


def _refuse(what: str) -> None:
    raise RuntimeError(
        f"{what} would find no gradients: release_gradients() uses and frees them in backward. "
        "Change gradients by Tensor.register_hook of the parameters, look at parameters in a step "
        "post-hook, or train without release_gradients()"
    )


def _named(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
