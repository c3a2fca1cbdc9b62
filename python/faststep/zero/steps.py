"""What a step over slices does, whatever memory they are in."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..grads.total import returned
from ..optim.request import StepAnswer, StepRequest
from .group import Group
from .owned import Owned
from .slots import Slot

__all__ = ["Steps"]


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

    def end(self) -> None:  # noqa: B027
        """Before another object takes its place: raise what is known of the step before."""

    @abstractmethod
    def update(self, request: StepRequest) -> tuple[StepAnswer, bool]:
        """Update this rank's slices; returns whether they may have changed too. A collective."""

    @abstractmethod
    def clip(self, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        """Clip by the common norm, and return it. A collective."""

    @abstractmethod
    def unscale(self, dtype: torch.dtype, inv_scale: Tensor, found_inf: Tensor) -> None:
        """Multiply the gradients of a dtype, and look for infinities on all ranks; a collective."""

    def _returned(self, norm: Tensor, present: list[bool], error_if_nonfinite: bool) -> Tensor:
        """The norm as `clip` returns it, or the error that it is not finite."""
        here = zip(self._slots, present, strict=True)
        dtypes = [slot.param.dtype for slot, is_present in here if is_present]
        dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32
        return returned(norm, dtype, 2.0, error_if_nonfinite)
