"""The gradients that the ranks have in slices, as a script reads and changes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..._torch.tensors import foreach_norms
from ..layout.slots import Slot
from ..transport.group import Group
from .gradients import Gradients


class GradientValues:
    """The answers of placeholders.

    `unscale` multiplies all gradients of a dtype, and looks for infinities on all ranks; a
    collective.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        gradients: Gradients,
        group: Group,
        unscale: Callable[[torch.dtype, Tensor, Tensor], object],
    ) -> None:
        self._slots = slots
        self._gradients = gradients
        self._group = group
        self.unscale = unscale
        self._norms: dict[float, Tensor] = {}  # by order
        self._measured_at = -1  # how often gradients had changed then

    def name_of(self, index: int) -> str:
        return self._slots[index].name

    def make_zero(self, index: int) -> None:
        """Set the gradient of a parameter to zero, on this rank."""
        self._gradients.zero(self._slots[index])

    def change(
        self, index: int, update: Callable[[Tensor, Callable[[Tensor], Tensor]], object]
    ) -> None:
        """Change a gradient, on this rank; all ranks are expected to do the same.

        `update` is called with a flat part of the gradient, and with a function that cuts a tensor
        of the parameter's shape, or one that broadcasts to it, to this part.
        """
        slot = self._ready(index)
        if slot.whole is not None:
            update(slot.whole, lambda other: other)
            return
        if slot.part is not None:
            update(slot.part.grad, lambda other: _part_of(slot, other))
        self._gradients.changes += 1

    def whole(self, index: int) -> Tensor:
        """The gradient of a parameter, gathered from the ranks; a collective."""
        slot = self._ready(index)
        if slot.whole is not None:
            return slot.whole
        what = f"reading the gradient of {slot.name!r}"
        self._group.meet(what)
        flat = torch.zeros(slot.shape.numel(), dtype=slot.stand_in.dtype, device=slot.param.device)
        if (part := slot.part) is not None:
            flat[part.begin : part.begin + part.grad.numel()] = part.grad
        if flat.numel():  # zeros of other ranks change no bit
            self._group.add_up_inside(flat.view(torch.uint8), what)
        return flat.as_strided(slot.shape, slot.strides)

    def keep(self, index: int, whole: Tensor) -> None:
        """Let a tensor from `whole` be the gradient, as a view of it may be written."""
        self._slots[index].whole = whole

    def norm(self, index: int, order: float) -> Tensor:
        """The norm of the gradient of a parameter, fp64; a collective after each change of any."""
        slot = self._ready(index)
        if slot.whole is not None:
            norm: Tensor = torch.linalg.vector_norm(slot.whole, order, dtype=torch.float64)
            return norm
        if self._measured_at != self._gradients.changes:
            self._norms.clear()
            self._measured_at = self._gradients.changes
        if order not in self._norms:
            self._norms[order] = self._measured(order)
        return self._norms[order][index]

    def _measured(self, order: float) -> Tensor:
        """The norms of the slices, put together over the ranks."""
        what = f"reading the norms of gradients (of order {order:g})"
        self._group.meet(what)
        parts = [(s.index, s.part.grad) for s in self._slots if s.part and s.part.grad.numel()]
        found = foreach_norms([grad for _, grad in parts], order)
        shape, device = (self._group.world, len(self._slots)), self._slots[0].param.device
        rows = torch.zeros(shape, dtype=torch.float64, device=device)
        mine = rows[self._group.rank]
        mine.fill_(torch.inf if order < 0 else 0.0)
        for (index, _), norm in zip(parts, found, strict=True):
            mine[index] = norm
        self._group.add_up_inside(rows, what)
        norms: Tensor = rows.sum(0) if order == 0 else torch.linalg.vector_norm(rows, order, dim=0)
        return norms

    def _ready(self, index: int) -> Slot:
        """Have the slices complete before one is used."""
        slot = self._slots[index]
        self._gradients.refuse_local(slot)
        self._gradients.before_exchange("the use of a gradient")
        self._gradients.complete(
            f"use of the gradient of {slot.name!r} (DistributedDataParallel goes around the model "
            "before shard())"
        )
        return slot


def _part_of(slot: Slot, other: Tensor) -> Tensor:
    """The part of another tensor beside a slice, in fp32 where the slice has that for bf16."""
    assert slot.part is not None
    part = slot.cut(other)
    return part.to(slot.part.grad.dtype) if part.dtype == slot.stand_in.dtype else part
