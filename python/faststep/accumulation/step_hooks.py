"""The hooks around the step of an optimizer that accumulates."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from .._torch.compiler import disable_dynamo
from ..grads.owners import accumulating

if TYPE_CHECKING:
    from .window import Window

__all__ = ["StepHooks"]


class StepHooks:
    """The hooks around an optimizer's step, which keep neither it nor the window alive."""

    def __init__(self, window: Window, optimizer: Optimizer) -> None:
        owner = weakref.ref(window)
        accumulating.set(optimizer, window)

        @disable_dynamo
        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (window := owner()) is not None:
                closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
                window.before_step(optimizer, closure is not None)

        @disable_dynamo
        def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (window := owner()) is not None:
                window.after_step(optimizer)

        self._check = before
        self._before = optimizer.register_step_pre_hook(before)
        self._after = optimizer.register_step_post_hook(after)

    def come_last(self, optimizer: Optimizer) -> None:
        """Check gradients after the script's own hooks before the step: those may change them."""
        self._before.remove()
        self._before = optimizer.register_step_pre_hook(self._check)

    def remove(self) -> None:
        """Take both away."""
        self._before.remove()
        self._after.remove()
