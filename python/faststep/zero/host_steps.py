"""A step over slices in CPU memory: measured, agreed on by all ranks, and applied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C
from .._torch.optim import increment_version
from ..clip import clip_grads_with_norm_
from ..optim.request import StepAnswer, StepRequest
from .group import Group
from .norm import ChunkSums
from .owned import Owned, set_grads
from .slots import Slot
from .steps import Steps

__all__ = ["HostSteps"]


class HostSteps(Steps):
    """A step of parameters in CPU memory."""

    def __init__(self, slots: Sequence[Slot], owned: Owned, group: Group) -> None:
        super().__init__(slots, owned, group)
        self._sums = ChunkSums(slots, group)

    def update(self, request: StepRequest) -> tuple[StepAnswer, bool]:
        """Update this rank's slices; returns whether they may have changed too. A collective."""
        found = request.found_inf
        if found is not None and not request.looks_for_inf and found.item():
            return StepAnswer(True, None), False
        norm, present = None, [slot.is_present for slot in self._slots]
        if request.measures:
            measured = self._sums.measure(_inverse(request.grad_scale))
            norm, present = measured.norm, measured.present
            if request.looks_for_inf and measured.found_inf:
                if found is not None:
                    found.fill_(1.0)
                return StepAnswer(True, norm), False
        set_grads(self._slots, present)
        exact = None if norm is None else torch.tensor(norm, dtype=torch.float64)
        self._owned.step(request._replace(found_inf=None, looks_for_inf=False), exact)
        return StepAnswer(False, norm), True

    def clip(self, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        """Clip by the common norm, and return it. A collective."""
        measured = self._sums.measure(1.0)
        norm = torch.tensor(measured.norm, dtype=torch.float64)
        rounded = self._returned(norm, measured.present, error_if_nonfinite)
        set_grads(self._slots, measured.present)
        pieces = [piece for slot in self._slots for piece, _ in slot.pieces]
        clip_grads_with_norm_(pieces, max_norm, norm)
        return rounded

    def unscale(self, dtype: torch.dtype, inv_scale: Tensor, found_inf: Tensor) -> None:
        """Multiply the gradients of a dtype, and look for infinities on all ranks; a collective."""
        pieces = []
        for slot in self._slots:
            if slot.param.dtype != dtype or not slot.is_present:
                continue
            for piece, grad in slot.pieces:
                piece.grad = grad
                pieces.append(piece)
        _, overflow, written = _C.unscale_grads(pieces, inv_scale.item(), True)
        increment_version(written)
        flag = torch.tensor([float(overflow)])
        self._group.add_up(flag, "agreeing on an overflow")
        if flag.item():
            found_inf.fill_(1.0)


def _inverse(scale: Tensor | None) -> float:
    """What gradients are multiplied by, rounded as a step of one process rounds it."""
    if scale is None:
        return 1.0
    inverse = 1.0 / float(scale.item())
    if scale.dtype == torch.float64:
        return inverse
    return float(torch.tensor(inverse, dtype=torch.float32).item())
