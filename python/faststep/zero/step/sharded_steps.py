"""A step over slices: measured, agreed on by all ranks, and applied.

What the ranks agree on lies in tensors beside the slices. In CPU memory the host looks at them
before anything is written. On a CUDA device it waits for nothing: an overflow is skipped there, and
what is wrong is raised by the next step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import _C
from ..._devices import HOST, on_device
from ..._torch.optim import increment_version
from ...clip import clip_grads_with_norm_
from ...grads.total import returned
from ...optim.request import StepAnswer, StepRequest
from ..layout.slots import Slot
from ..transport.group import Group
from ..transport.late import Late, refuse_capture
from .norm import ChunkSums, Measured
from .owned import Owned, set_grads

__all__ = ["ShardedSteps"]


class ShardedSteps:
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
        self._sums = ChunkSums(slots, group)
        self._on_host = group.device.type == "cpu"
        self._here = HOST if self._on_host else group.device.index
        self._differ: Late | None = None  # whether ranks did in the step before

    def update(self, request: StepRequest) -> tuple[StepAnswer, bool]:
        """Update this rank's slices; returns whether they may have changed too. A collective."""
        if not self._on_host:
            refuse_capture()
        self.end()
        found, scale, norm = request.found_inf, request.grad_scale, None
        flag = None if found is None else on_device(found, self._here)
        if not request.looks_for_inf and self._is_seen(flag):
            return StepAnswer(True, None), False
        present = self._present()
        if request.measures:
            norm, found_inf, differ = self._measure(present, scale)
            if request.looks_for_inf:
                flag = found_inf
                if found is not None:
                    found.copy_(flag, non_blocking=True)
            if self._is_seen(flag):
                return StepAnswer(True, norm.item()), False
            flag = differ if flag is None else torch.maximum(flag.float(), differ)
        set_grads(self._slots, present)
        scale = None if scale is None else on_device(scale, self._here)
        self._owned.step(
            request._replace(grad_scale=scale, found_inf=flag, looks_for_inf=False, norm=norm)
        )
        if self._on_host:
            return StepAnswer(False, None if norm is None else norm.item()), True
        return StepAnswer(False if flag is None else flag, norm), True

    def clip(self, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        """Clip by the common norm, and return it. A collective."""
        self.end()
        present = self._present()
        norm = self._measure(present, None).norm
        dtypes = [slot.param.dtype for slot in itertools.compress(self._slots, present)]
        dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32
        if error_if_nonfinite:  # before anything is written; waits for a device
            returned(norm, dtype, 2.0, True)
        set_grads(self._slots, present)
        pieces = [piece for slot in self._slots for piece, _ in slot.pieces]
        clip_grads_with_norm_(pieces, max_norm, norm)
        return returned(norm, dtype, 2.0, False)

    def unscale(self, dtype: torch.dtype, inv_scale: Tensor, found_inf: Tensor) -> None:
        """Multiply the gradients of a dtype, and look for infinities on all ranks; a collective."""
        alike = [slot for slot in self._slots if slot.param.dtype == dtype and slot.is_present]
        grads = [grad for slot in alike for _, grad in slot.pieces]
        flag = torch.zeros((), dtype=torch.float32, device=self._group.device)
        if self._on_host:
            set_grads(alike, [True] * len(alike))
            pieces = [piece for slot in alike for piece, _ in slot.pieces]
            _, overflow, grads = _C.unscale_grads(pieces, inv_scale.item(), True)
            flag.fill_(overflow)
        elif grads:
            _C.device_unscale(grads, on_device(inv_scale, self._here), flag, True)
        increment_version(grads)
        self._group.add_up(flag, "agreeing on an overflow")
        flag = (flag != 0.0).to(found_inf.dtype)
        found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)), non_blocking=True)

    def end(self) -> None:
        """Raise on all ranks if they differed in the step before, which a CUDA device has done."""
        noted, self._differ = self._differ, None
        if noted is not None:  # of a step whose successor's backward is queued already
            _refuse(noted.read())

    def _present(self) -> list[bool]:
        return [slot.is_present for slot in self._slots]

    def _is_seen(self, flag: Tensor | None) -> bool:
        """Whether the host knows of an overflow before the step."""
        return self._on_host and flag is not None and bool(flag)

    def _measure(self, present: list[bool], scale: Tensor | None) -> Measured:
        """The norm, with an error if the ranks differ in their gradients; the next step's error on
        a CUDA device.
        """
        measured = self._sums.measure(present, scale)
        if self._on_host:
            _refuse(measured.differ)
        else:
            self._differ = Late(measured.differ)
        return measured


def _refuse(differ: Tensor) -> None:
    if differ.item():
        raise RuntimeError(
            "faststep.zero: the ranks had gradients of different parameters when they measured "
            "the norm: some have set a .grad to None by themselves. That step was skipped on "
            "all ranks; set .grad to None on all of them or on none"
        )
