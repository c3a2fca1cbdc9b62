"""The parameters of a bucket, side by side in one flat tensor that collectives read and write.

In CPU memory each has a Storage of its own there: what saves by Storage finds one parameter in
each. On a CUDA device those of a bucket share one.

A script may exchange the memory of parameters by `.data`, or share it with other tensors. A step
takes over the values of parameters that lie elsewhere, after the flat tensor has moved to new
memory if a tensor of the script holds what they have left. A parameter whose memory others share
stays there, and gets a copy of its new values.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..._torch.optim import increment_version
from ..._torch.tensors import uses_of
from .cuts import Bucket
from .pages import Pages
from .slots import Slot


class FlatParams:
    """The memory of a bucket's parameters, which moves to one tensor, `flat`, as `layout` says."""

    def __init__(self, layout: Bucket, slots: Sequence[Slot], device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._slots = slots
        self._pieces: list[tuple[Tensor, int]] = []  # and where they begin
        self._outside: list[tuple[Tensor, Tensor]] = []  # memory of parameters, and their views
        self._allocate()
        for number in range(len(slots)):
            self._take_over(number, moves=True)

    def _allocate(self) -> None:
        layout = self._layout
        self.flat = Pages(layout.size, layout.dtype, self._device).tensor
        self._views = [
            self.flat.as_strided(slot.shape, slot.strides, place.begin)
            for slot, place in zip(self._slots, layout.places, strict=True)
        ]
        self._places = [_place_of(view) for view in self._views]
        self._lent: list[tuple[Tensor, object] | None] = [None] * len(self._slots)
        for piece, at in self._pieces:
            piece.data = self.flat[at : at + piece.numel()]

    def piece(self, at: int, count: int) -> Tensor:
        """A part of the flat tensor, which moves with it."""
        piece = self.flat[at : at + count].detach()
        self._pieces.append((piece, at))
        return piece

    def away(self) -> list[int]:
        """The numbers of the parameters that lie elsewhere; raises if one became another kind."""
        found = []
        for number, (slot, place) in enumerate(zip(self._slots, self._places, strict=True)):
            param = slot.param
            if _place_of(param) == place:
                continue
            flat, shape = self.flat, tuple(slot.shape)
            if (param.size(), param.dtype, param.device) != (shape, flat.dtype, flat.device):
                raise RuntimeError(
                    f"faststep.zero: {slot.name!r} became {param.dtype} of shape "
                    f"{tuple(param.shape)} on {param.device} after shard(), where it was "
                    f"{flat.dtype} of shape {shape} on {flat.device}: change the model before "
                    "shard(); nothing was updated"
                )
            found.append(number)
        return found

    def follow(self, away: Sequence[int]) -> None:
        """Take over the values of parameters that lie elsewhere; none may be on their way."""
        self._outside = []
        if any(self._is_held(number) for number in away):
            self._allocate()
            for number in set(range(len(self._slots))).difference(away):
                # On a device all of them refer to one Storage.
                self._take_over(number, moves=not self.flat.is_cpu)
        for number in away:
            self._take_over(number)
        increment_version([piece for piece, _ in self._pieces])

    def arrived(self) -> None:
        """When the flat tensor has the values of a step: copy them to parameters elsewhere."""
        for memory, view in self._outside:
            memory.copy_(view)

    def _is_held(self, number: int) -> bool:
        """True if a tensor of the script may have what was a parameter's memory."""
        if not self.flat.is_cpu:
            return True
        lent = self._lent[number]
        if lent is None or lent[0].data_ptr() != self._views[number].data_ptr():
            return False  # nobody had it, or share_memory_() has moved all who had
        return _uses(lent[0]) != lent[1]

    def _take_over(self, number: int, moves: bool = False) -> None:
        """Copy a parameter's values here; it moves here too if `moves` or nobody else has them."""
        param, view = self._slots[number].param, self._views[number]
        view.copy_(param.detach())
        if moves or _is_alone(param):
            lent = _with_storage(view)
            self._lent[number] = lent, _uses(lent)
            param.data = lent
        else:
            self._outside.append((param.detach(), view))


def _place_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.size(), tensor.stride()


def _with_storage(view: Tensor) -> Tensor:
    """The same memory as a Storage of its own, in CPU memory, that keeps all of the memory."""
    if not view.is_cpu:
        return view
    flat: Tensor = torch.from_dlpack(view.as_strided((view.numel(),), (1,)))  # type: ignore[attr-defined]
    return flat.as_strided(view.size(), view.stride())


def _uses(tensor: Tensor) -> object:
    """How often torch and Python refer to a tensor's Storage."""
    return uses_of(tensor)[1], sys.getrefcount(tensor.untyped_storage())


def _is_alone(param: Tensor) -> bool:
    """True if no other tensor and no other process has the memory of a parameter."""
    if param.is_cpu and param.is_shared():  # type: ignore[no-untyped-call]
        return False
    return _uses(param) == _uses(torch.empty(0, device="cpu"))


def refuse_overlaps(params: Iterable[tuple[str, Tensor]], where: str, undone: str) -> None:
    """Raise TypeError for parameters that share memory: moving them apart would change the model.

    The error begins with `where`, and says that nothing was `undone`.
    """
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in params if p.nbytes)
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise TypeError(
                f"{where}: parameters {name!r} and {other!r} share memory but are two objects; tie "
                f"them by using the same Parameter twice; nothing was {undone}"
            )
