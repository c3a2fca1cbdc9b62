"""Gradients measured in backward, so that a step that clips is a single pass.

The hook of each parameter measures its gradient while it is in the cache: it takes the sums of
squares, chunk by chunk over the tree of csrc/rules/tree.h. The step adds these sums up in the order
of its own pass, so norm, clip coefficient and parameters have the same bits. First the step checks
that each `.grad` is the tensor that was measured, with the same version and the same scale. If one
is not, the step measures all gradients itself, as without hooks, and counts that.

Under DistributedDataParallel each bucket is measured as soon as it is reduced. After backward the
model puts the gradients into `.grad`, and the measurements are assigned to those tensors.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .. import _C
from .._devices import HOST_ONLY
from .._torch.compiler import disable_dynamo
from .._torch.modes import is_watched
from .._torch.ranks import world_size
from .buckets import Pairs, Reduced
from .hooks import Hooked
from .params import OnDevices, name_of, params_of

__all__ = ["BackwardNorm"]

_REASONS = {
    "changed": "the gradient of {} was changed or replaced after its hook",
    "unmeasured": "the gradient of {} was not measured in its last backward",
    "scale": "the scale of the gradients changed again, so that the hooks multiplied by an old one",
    "distributed": "there are several ranks, which may reduce gradients after the hooks without "
    "a sign; give norm_in_backward the DistributedDataParallel model",
    "device": "parameters are on CUDA, and hooks measure on the CPU only",
}


class _Slot:
    """Where `_C.Squares` keeps the measurement: the parameter's index over all groups."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class BackwardNorm:
    """The hooks of one optimizer, and what they measured since its last step."""

    def __init__(self, optimizer: OnDevices, model: DistributedDataParallel | None = None) -> None:
        self.fallbacks: Counter[str] = Counter()
        self.wanted = True  # the next step is assumed to measure if the last one did
        self.idle = False  # set before the last micro-step of an accumulation window
        self._squares = _C.Squares()
        self._slots: Hooked[_Slot] = Hooked()
        self._scale_changed = False  # whether the last step found another scale
        self._loss_scale = 1.0  # of the last step
        self._divisor = 1.0  # of the next step, as accumulation announces it
        self._warned: set[str] = set()  # reasons
        self._moving: dict[int, int] = {}  # slot: the version that `.grad` will have
        self._reduced: Reduced | None = None
        if model is not None:
            self._reduced = Reduced.of(model, "norm_in_backward")
            self._reduced.add(self)
        self.attach(optimizer)

    def attach(self, optimizer: OnDevices) -> None:
        """Hook parameters that are new or were unfrozen, and update the slots of the others."""
        for index, param in enumerate(params_of(optimizer)):
            slot = self._slots.of(param)
            if slot is not None:
                slot.index = index
            elif param.requires_grad:
                slot = _Slot(index)
                # Under DistributedDataParallel its buckets are measured instead.
                hook = _hook(weakref.ref(self), slot) if self._reduced is None else None
                self._slots.add(param, slot, hook)

    def reattach(self, optimizer: OnDevices) -> None:
        """Set the hooks anew, so that they run after those that others have set since."""
        self._slots.remove()
        self.attach(optimizer)

    def measure(self, slot: int, param: Tensor) -> None:
        """Called by the hook of a parameter."""
        if self.wanted and not self.idle and not is_watched():
            self._squares.measure(slot, param)

    def measure_reduced(self, param: Tensor) -> None:
        """Measure a `.grad` that was reduced over the ranks outside of the model's hook."""
        slot = self._slot_of(param)
        if slot is not None and self._reduced is not None and self.wanted and not is_watched():
            self._squares.measure(slot, param)

    def _slot_of(self, param: Tensor) -> int | None:
        slot = self._slots.of(param)
        return None if slot is None else slot.index

    def reduced(self, param: Tensor, values: Tensor) -> None:
        """Measure a gradient in a bucket that is reduced."""
        slot = self._slot_of(param)
        if slot is not None and self.wanted and not self.idle and not is_watched():
            self._squares.measure(slot, param, values)

    def ending(self, pairs: Pairs) -> None:
        """Note which version each `.grad` has once DistributedDataParallel has written it."""
        for param, values in pairs:
            slot, grad = self._slot_of(param), param.grad
            if slot is not None and grad is not None:
                copied = grad.data_ptr() != values.data_ptr()  # else it is part of the bucket
                self._moving[slot] = grad._version + copied

    def ended(self, pairs: Pairs) -> None:
        """Record the `.grad` tensors as measured: the model has put the gradients there."""
        for param, _ in pairs:
            slot = self._slot_of(param)
            if slot is not None and (version := self._moving.pop(slot, None)) is not None:
                self._squares.adopt(slot, param, version)

    def expect(self, divisor: float) -> None:
        """Measure for a step that divides by this and by the loss scale of the last step."""
        self._divisor = divisor
        # The dtype that the step will get: the inverse of a float32 scale is rounded.
        dtype = torch.float32 if divisor == 1.0 else torch.float64
        self._squares.expect(torch.tensor(self._loss_scale * divisor, dtype=dtype, device="cpu"))

    def for_step(
        self,
        optimizer: OnDevices,
        params: list[list[Tensor]],
        grad_scale: Tensor | None,
        measures: bool,
    ) -> _C.Squares | None:
        """The measurements, if the step needs them and every gradient is as it was measured."""
        self.wanted, self.idle = measures, False
        if not measures:
            return None
        if optimizer._devices != HOST_ONLY:
            self._refuse(optimizer, "device")
            return None
        if self._reduced is None and world_size() > 1:
            self.wanted = False
            self._refuse(optimizer, "distributed")
            return None
        scale = 1.0 if grad_scale is None else grad_scale.item()
        self._loss_scale, self._divisor = scale / self._divisor, 1.0
        problem = self._squares.check(params, grad_scale)
        if problem is not None:
            self._refuse(optimizer, *problem)
            return None
        self._scale_changed = False
        return self._squares

    def _refuse(self, optimizer: OnDevices, why: str, group: int = 0, index: int = 0) -> None:
        """Count a step that measures all gradients itself, and warn once per reason."""
        self.fallbacks[why] += 1
        # A single change of scale is ordinary: the first step, an overflow, growth.
        tolerable = why == "scale" and not self._scale_changed
        self._scale_changed = why == "scale"
        if why not in self._warned and not tolerable:
            self._warned.add(why)
            name = name_of(optimizer, group, index)
            warnings.warn(
                f"{type(optimizer).__name__}(norm_in_backward=True): {_REASONS[why].format(name)}; "
                "the step measured all gradients in a pass of its own. Such steps are counted in "
                "norm_fallbacks",
                stacklevel=_callers_level(),
            )
        self.attach(optimizer)

    def moved(self, optimizer: OnDevices) -> None:
        """Count a step during which Python code ran and replaced gradients after the check."""
        self._refuse(optimizer, "changed")

    def forget(self) -> None:
        """Drop the measurements and the gradients that they hold."""
        self._squares.forget()

    def remove(self) -> None:
        """Take the hooks away."""
        self._slots.remove()
        if self._reduced is not None:
            self._reduced.drop(self)
        self.forget()


def _callers_level() -> int:
    """The `stacklevel` with which the caller of this function warns about the user's line."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals["__name__"].startswith(("faststep.", "torch.")):
        frame, level = frame.f_back, level + 1
    return level


def _hook(owner: Callable[[], BackwardNorm | None], slot: _Slot) -> Callable[[Tensor], None]:
    @disable_dynamo
    def measure(param: Tensor) -> None:
        if (norm := owner()) is not None:
            norm.measure(slot.index, param)

    return measure
