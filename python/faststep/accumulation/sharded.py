"""The ranks of a sharded optimizer (faststep.zero), which reduces gradients by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch.optim import Optimizer

from .reduction import Ranks


class Sharded(Protocol):
    """The parts of faststep.zero's optimizers that accumulation uses."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside send nothing."""

    @property
    def sums_in_fp32(self) -> bool:
        """True if the ranks' gradients of low-precision parameters are added up in fp32."""

    def add_up(self, numbers: torch.Tensor) -> int:
        """Replace numbers by their sums over all ranks; the number of ranks."""

    def reduce(self) -> None:
        """Reduce what no_sync() has left."""


def is_sharded(optimizer: Any) -> TypeGuard[Sharded]:
    """True if this is an optimizer of faststep.zero, which builds on nothing of this folder."""
    return isinstance(optimizer, Optimizer) and hasattr(type(optimizer), "add_up")


class ReducingRanks(Ranks):
    """Ranks whose gradients somebody reduces to their mean: in backward, or when asked to."""

    @property
    def knows_model(self) -> bool:
        """True if nobody else reduces the gradients."""
        return True

    def reduce(self) -> None:
        """Reduce the gradients of a window that ended early; a collective."""
        raise NotImplementedError


class ShardedRanks(ReducingRanks):
    """Ranks whose gradients the optimizer reduces."""

    def __init__(self, optimizer: Sharded) -> None:
        super().__init__(None)
        self._optimizer = optimizer

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self._optimizer.add_up(torch.zeros(0))

    def set_quiet(self, quiet: bool) -> None:
        """Keep backward from communicating; False allows it again."""
        self._quiet.close()
        if quiet:
            self._quiet.enter_context(self._optimizer.no_sync())

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums of these numbers over all ranks; a collective."""
        exact = torch.tensor(numbers, dtype=torch.float64)
        self._optimizer.add_up(exact)
        found: list[float] = exact.tolist()
        return found

    def reduce(self) -> None:
        """Reduce the gradients of a window that ended early; a collective."""
        self._optimizer.reduce()
