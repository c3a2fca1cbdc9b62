"""The optimizers' steps: the hooks around them, and what they made of a complete window."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from ..grads import divide as division
from ..grads.hooks import weakly
from ..optim.base import FusedOptimizer


class Steps:
    """The outcome of these optimizers' steps for the window that is complete.

    `optimizers` is the window's own list, which is empty once the window is removed.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._divisions: dict[int, division.Division | None] = {}  # that the steps made
        self._overflows: list[bool | Tensor] = []

    def has(self, optimizer: Optimizer) -> bool:
        """True if the step of this optimizer was called."""
        return id(optimizer) in self._divisions

    def are_all(self) -> bool:
        """True if each optimizer's step was called."""
        return all(map(self.has, self._optimizers))

    def were_skipped(self) -> bool:
        """True if an optimizer's step was not called, or skipped for an overflow."""
        return not self.are_all() or any(bool(found) for found in self._overflows)

    def note(self, optimizer: Optimizer) -> None:
        """The step of this optimizer is over: its division is made."""
        self._divisions[id(optimizer)] = division.settle(optimizer)
        found = vars(optimizer).get("found_inf")
        if isinstance(optimizer, FusedOptimizer):
            skipped = optimizer._skipped
            self._overflows.append(skipped != 0 if isinstance(skipped, Tensor) else skipped)
        elif isinstance(found, Tensor):
            self._overflows.append(found.detach() != 0)

    def repeat_division(self, optimizer: Optimizer) -> None:
        """Let a sum that the step has left in `.grad` be divided again by the next step."""
        division.repeat(optimizer, self._divisions.get(id(optimizer)))

    def forget(self) -> None:
        """The window is over."""
        self._divisions.clear()
        self._overflows.clear()


class StepHooks:
    """Two methods of a window around an optimizer's step. Neither of the two is kept alive."""

    def __init__(
        self, optimizer: Optimizer, begin: Callable[..., None], end: Callable[..., None]
    ) -> None:
        self._check = weakly(begin)
        self._before = optimizer.register_step_pre_hook(self._check)
        self._after = optimizer.register_step_post_hook(weakly(end))

    def come_last(self, optimizer: Optimizer) -> None:
        """Check gradients after the script's own hooks before the step: those may change them."""
        self._before.remove()
        self._before = optimizer.register_step_pre_hook(self._check)

    def remove(self) -> None:
        """Take both away."""
        self._before.remove()
        self._after.remove()
