"""The gradients that the ranks have in slices, as a script reads and changes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..._torch.optim import increment_version
from ..._torch.tensors import foreach_norms
from ..layout.placeholder import Placeholder
from ..layout.slots import Slot
from ..transport.group import Group
from .gradients import Gradients


class GradientValues:
    """The answers of placeholders, also of those whose gradient was dropped.

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

    def make_zero(self, held: Placeholder) -> None:
        """Set a gradient to zero, on this rank."""
        self._gradients.zero(self._slot_of(held))

    def change(
        self, held: Placeholder, update: Callable[[Tensor, Callable[[Tensor], Tensor]], object]
    ) -> None:
        """Change a gradient, on this rank; all ranks are expected to do the same.

        `update` is called with a flat part of the gradient, and with a function that cuts a tensor
        of the parameter's shape, or one that broadcasts to it, to this part.
        """
        slot = self._ready(held)
        if (own := slot.own) is not None:
            update(own, lambda other: other)
        elif slot.part is not None:
            update(slot.part.grad, lambda other: _part_of(slot, other, held.dtype))
            increment_version([slot.part.grad])  # operators do not, inside of another one
        self._gradients.changes += 1

    def whole(self, held: Placeholder) -> Tensor:
        """A gradient, gathered from the ranks; a collective."""
        return self._gathered(self._ready(held), held)

    def _gathered(self, slot: Slot, like: Tensor) -> Tensor:
        if (own := slot.own) is not None:
            return own
        what = f"reading the gradient of {slot.name!r}"
        self._group.meet(what)
        flat = torch.zeros(slot.shape.numel(), dtype=like.dtype, device=like.device)
        if (part := slot.part) is not None:
            flat[part.begin : part.begin + part.grad.numel()] = part.grad
        if flat.numel():  # zeros of other ranks change no bit
            self._group.add_up_inside(flat.view(torch.uint8), what)
        return flat.as_strided(slot.shape, slot.strides)

    def keep(self, held: Placeholder, whole: Tensor) -> None:
        """Let a tensor from `whole` be the gradient, as a view of it may be written."""
        slot = self._slot_of(held)
        if slot.own is not whole:
            slot.whole = whole

    def norm(self, held: Placeholder, order: float) -> Tensor:
        """The norm of a gradient, fp64; a collective after each change of any."""
        slot = self._ready(held)
        if slot.own is not None or slot is not self._slots[held.number]:
            whole = self._gathered(slot, held)
            norm: Tensor = torch.linalg.vector_norm(whole, order, dtype=torch.float64)
            return norm
        if self._measured_at != self._gradients.changes:
            self._norms.clear()
            self._measured_at = self._gradients.changes
        if order not in self._norms:
            self._norms[order] = self._measured(order)
        return self._norms[order][held.number]

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

    def _slot_of(self, held: Placeholder) -> Slot:
        kept: Slot | None = held.first.kept
        return self._slots[held.number] if kept is None else kept

    def _ready(self, held: Placeholder) -> Slot:
        """Have a gradient complete before it is used; in no_sync() it is what this rank has."""
        slot = self._slot_of(held)
        self._gradients.before_exchange("the use of a gradient")
        if not self._gradients.is_local:
            self._gradients.complete(
                f"use of the gradient of {slot.name!r} (DistributedDataParallel goes around the "
                "model before shard())"
            )
        elif slot is self._slots[held.number] and slot.held:  # it adds to the means of before
            means, more = self._gathered(slot, held), slot.stand_in.pending
            slot.stand_in.pending = means if more is None else means + more
            slot.held = False
            self._gradients.zero(slot)
        return slot


def _part_of(slot: Slot, other: Tensor, dtype: torch.dtype) -> Tensor:
    """The part of another tensor beside a slice, in fp32 where the slice has that for `dtype`."""
    assert slot.part is not None
    part = slot.cut(other) if other.dim() else other  # operators may take nothing but a number
    return part.to(slot.part.grad.dtype) if part.dtype == dtype else part
