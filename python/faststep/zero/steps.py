"""What a step over slices does, whatever memory they are in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..optim.request import StepAnswer, StepRequest
from .group import Group
from .owned import Owned
from .slots import Slot

__all__ = ["NOT_FINITE", "Steps"]

NOT_FINITE = (
    "The total norm of order 2.0 for the gradients is non-finite, so it cannot be clipped; set "
    "error_if_nonfinite=False to scale them by it anyway"
)


class Steps(ABC):
    """What a step does between backward and the gathering of parameters.

    Args:
        slots: all parameters, in the order of the parameter groups.
        owned: this rank's optimizer.
        group: the ranks.
    """

    def __init__(self, slots: Sequence[Slot], owned: Owned, group: Group) -> None:
        self._slots = slots
        self._owned = owned
        self._group = group

    @abstractmethod
    def update(self, request: StepRequest) -> tuple[StepAnswer, bool]:
        """Update this rank's slices; returns whether they may have changed too. A collective."""

    @abstractmethod
    def clip(self, max_norm: float, error_if_nonfinite: bool) -> tuple[Tensor, list[bool]]:
        """Clip by the common norm; returns it and which gradients are present. A collective."""

    @abstractmethod
    def unscale(self, dtype: torch.dtype, inv_scale: Tensor, found_inf: Tensor) -> None:
        """Multiply the gradients of a dtype, and look for infinities on all ranks; a collective."""
