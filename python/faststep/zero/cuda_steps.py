"""A step over slices on a CUDA device: what the host would wait for stays in tensors there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C
from .._devices import on_device, ordinal_of
from .._torch.optim import increment_version
from ..clip import clip_grads_with_norm_
from ..optim.request import StepAnswer, StepRequest
from .cuda_buckets import refuse_capture
from .cuda_norm import DeviceChunkSums
from .group import Group
from .owned import Owned, set_grads
from .slots import Slot
from .steps import Steps

__all__ = ["CudaSteps"]


class CudaSteps(Steps):
    """A step of parameters on a CUDA device."""

    def __init__(self, slots: Sequence[Slot], owned: Owned, group: Group) -> None:
        super().__init__(slots, owned, group)
        self._sums = DeviceChunkSums(slots, group)
        self._differ: tuple[Tensor, torch.cuda.Event] | None = None  # of the step before

    def update(self, request: StepRequest) -> tuple[StepAnswer, bool]:
        """Update this rank's slices; returns whether they may have changed too. A collective."""
        refuse_capture()
        self.end()
        here = ordinal_of(self._slots[0].param)
        found, norm = request.found_inf, None
        flag = None if found is None else on_device(found, here)
        if request.measures:
            measured = self._sums.measure_there(request.grad_scale)
            norm = measured.norm
            if request.looks_for_inf:
                flag = measured.found_inf
                if found is not None:
                    found.copy_(flag, non_blocking=True)
            flag = measured.differ if flag is None else torch.maximum(flag.float(), measured.differ)
            self._note_difference(measured.differ)
        set_grads(self._slots, [slot.is_present for slot in self._slots])
        scale = None if request.grad_scale is None else on_device(request.grad_scale, here)
        self._owned.step(
            request._replace(grad_scale=scale, found_inf=flag, looks_for_inf=False), norm
        )
        return StepAnswer(False if flag is None else flag, norm), True

    def clip(self, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        """Clip by the common norm, and return it. A collective."""
        self.end()
        present = [slot.is_present for slot in self._slots]
        measured = self._sums.measure_there(None)
        self._note_difference(measured.differ)
        if error_if_nonfinite:  # before anything is written; waits for the device
            self._returned(measured.norm, present, True)
        set_grads(self._slots, present)
        pieces = [piece for slot in self._slots for piece, _ in slot.pieces]
        if any(piece.grad is not None for piece in pieces):
            clip_grads_with_norm_(pieces, max_norm, measured.norm)
        return self._returned(measured.norm, present, False)

    def unscale(self, dtype: torch.dtype, inv_scale: Tensor, found_inf: Tensor) -> None:
        """Multiply the gradients of a dtype, and look for infinities on all ranks; a collective."""
        here = ordinal_of(self._slots[0].param)
        alike = [slot for slot in self._slots if slot.param.dtype == dtype and slot.is_present]
        grads = [grad for slot in alike for _, grad in slot.pieces]
        flag = torch.zeros((), dtype=torch.float32, device=self._slots[0].param.device)
        if grads:
            _C.device_unscale(grads, on_device(inv_scale, here), flag, True)
            increment_version(grads)
        self._group.add_up(flag, "agreeing on an overflow")
        flag = (flag != 0.0).to(found_inf.dtype)
        found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)), non_blocking=True)

    def _note_difference(self, differ: Tensor) -> None:
        """Let the next step know whether the ranks had gradients of the same parameters."""
        seen = torch.empty((), dtype=torch.float32, pin_memory=True)
        seen.copy_(differ, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        self._differ = seen, event

    def end(self) -> None:
        """Raise on all ranks if they differed in the step before, which the device has done."""
        noted, self._differ = self._differ, None
        if noted is None:
            return
        seen, event = noted
        event.synchronize()  # of a step whose successor's backward is queued already
        if seen.item():
            raise RuntimeError(
                "faststep.zero: the ranks had gradients of different parameters when they measured "
                "the norm: some have set a .grad to None by themselves. That step was skipped on "
                "all ranks; set .grad to None on all of them or on none"
            )
