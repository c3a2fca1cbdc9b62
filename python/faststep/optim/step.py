"""One step of an optimizer: measure, agree, apply. No other module talks to `_C.Plan`.

Where all parameters lie on one device, a single call measures the gradients (if they are clipped or
checked) and applies the update. Where they lie on several, the devices have to agree on the norm
and on whether a gradient was infinite: one call measures on each device, the results are put
together, and another call applies the update with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _C
from .._devices import HOST, HOST_ONLY, Scalars, agree, devices_of, new_scalar, on_device
from .._torch.optim import increment_version, is_capturing
from .request import Rule, StepAnswer, StepRequest

if TYPE_CHECKING:
    from .base import FusedOptimizer

__all__ = ["MissingStateError", "StaleSquaresError", "Stepper", "Work"]

_NO_CLIPPING = math.nan
_NO_SCALARS = Scalars(None, None, None)


class StaleSquaresError(Exception):
    """`StepRequest.squares` are not those of the gradients; nothing was updated."""


class MissingStateError(Exception):
    """A state that the step must not create is missing; nothing was updated."""


class _DevicesChangedError(Exception):
    """Parameters lie on other devices than at the last step; nothing was updated."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        super().__init__(devices)
        self.devices = devices


class _Phase(IntEnum):
    """What one call of the plan does; see csrc/py/step/step_plan.h."""

    WHOLE = 0
    MEASURE = 1
    APPLY = 2


Place = tuple[int, int]  # a list of parameters or a group, and the index in it

# What the plan found and wrote: (skipped, norm, tensors written, gradients written).
_Done = tuple[bool, float | None, list[Tensor], list[Tensor] | None]


class Work:
    """Some or all parameters of an optimizer, how to step them, and the states made for one step.

    Args:
        params: lists of parameters.
        rules: gives a rule per list; asked again where devices have changed.
        groups: the group of each list. Default: None, all groups in their order.
        creates_states: whether missing states are created. Default: True.
        wants_norm: whether the answer needs the norm of a step on a device. Default: True.
        unchanged: ends the error that memory ran out.
    """

    __slots__ = (
        "_has_emptied_cache",
        "_new",
        "creates_states",
        "groups",
        "optimizer",
        "params",
        "rules",
        "unchanged",
        "wants_norm",
    )

    def __init__(
        self,
        optimizer: FusedOptimizer,
        params: list[list[Tensor]],
        rules: Callable[[], list[Rule]],
        groups: list[int] | None = None,
        creates_states: bool = True,
        wants_norm: bool = True,
        unchanged: str = "nothing was updated",
    ) -> None:
        self.optimizer = optimizer
        self.params = params
        self.rules = rules
        self.groups = groups
        self.creates_states = creates_states
        self.wants_norm = wants_norm
        self.unchanged = unchanged
        self._new: list[Place] | None = None  # of the states that were created; None: no state
        self._has_emptied_cache = False

    def run(
        self,
        plan: _C.Plan,
        rules: list[Rule],
        request: StepRequest,
        scalars: dict[int, Scalars],
        phase: _Phase,
    ) -> _Done:
        """Call the plan; create states that it misses, make room on a device, and call it again."""
        max_norm = _NO_CLIPPING if request.max_norm is None else request.max_norm
        while True:
            try:
                what, value = plan.step(
                    self.params,
                    rules,
                    self.optimizer.state,
                    self._new,
                    scalars,
                    request.looks_for_inf,
                    max_norm,
                    request.write_grads,
                    phase,
                    request.squares,
                )
            except _C.TensorError as error:
                raise _C.TensorError(*self.place(*error.args[:2]), *error.args[2:]) from None
            if what == "done":
                done: _Done = value
                return done
            if what == "missing":
                self._create_states(value, rules)
            elif what == "memory":
                self._empty_cache(value)
            elif what == "devices":
                raise _DevicesChangedError(tuple(value))
            else:
                raise StaleSquaresError

    def place(self, which: int, index: int) -> Place:
        """The group, and the index in it, of a parameter of one of the lists."""
        if self.groups is None:
            return which, index
        group, param = self.groups[which], self.params[which][index]
        params = self.optimizer.param_groups[group]["params"]
        return group, next((i for i, other in enumerate(params) if other is param), index)

    def _create_states(self, missing: list[Place], rules: list[Rule]) -> None:
        """Create states that were found missing; an error for those that still are."""
        if not self.creates_states:
            raise MissingStateError
        optimizer, before = self.optimizer, self._new or []
        for which, index in missing:
            keys = rules[which].state_keys
            if (which, index) in before:  # it is there, but None
                state = optimizer.state[self.params[which][index]]
                key = next(key for key in keys if state.get(key) is None)
                place = self.place(which, index)
                raise _C.TensorError(*place, f"state '{key}'", "value", "is None")
        for which, index in missing:
            optimizer._refuse_half_state(*self.place(which, index), rules[which].state_keys)
        self._new = sorted([*before, *missing])  # the first may have been dropped meanwhile
        with torch.no_grad():
            for which, index in missing:
                group = optimizer.param_groups[self.place(which, index)[0]]
                optimizer._new_state(group, self.params[which][index])

    def _empty_cache(self, reason: str) -> None:
        """Have torch give back device memory that nobody uses, once."""
        if self._has_emptied_cache or is_capturing():
            raise torch.OutOfMemoryError(f"{reason}; {self.unchanged}")
        self._has_emptied_cache = True
        torch.cuda.empty_cache()

    def drop_new_states_if(self, skipped: bool | Tensor) -> None:
        """Drop what was created for a step that was skipped; may wait for a device.

        It waits only where a state of zeros makes the next step differ from a missing state.
        """
        if self._new is None:
            return
        if isinstance(skipped, Tensor):
            groups = self.optimizer.param_groups
            places = (self.place(which, index) for which, index in self._new)
            differ = any(self.optimizer._zeros_differ(groups[group]) for group, _ in places)
            skipped = differ and bool(skipped.item() != 0.0)
        if skipped:
            self.drop_new_states()

    def drop_new_states(self) -> None:
        """Undo the creation where zeros make the next step differ from a missing state."""
        for which, index in self._new or ():
            self.optimizer._drop_new_state(self.params[which][index])


class Stepper:
    """Steps parameters by one `_C.Plan`, which remembers them between steps."""

    def __init__(self, plan: _C.Plan | None = None) -> None:
        self._plan = _C.Plan() if plan is None else plan
        self._norms: dict[int, Tensor] = {}  # per CUDA device: where it writes the norm
        self.devices: tuple[int, ...] = ()  # of the parameters of the last step

    def forget(self) -> None:
        """Let go of the tensors of earlier steps."""
        self._plan.forget()

    def find_devices(self, work: Work) -> None:
        """Set `devices` before the first step."""
        self.devices = devices_of(param for params in work.params for param in params)

    def step(self, work: Work, request: StepRequest) -> StepAnswer:
        """Update all parameters of `work` that have a gradient, or none of them.

        Raises:
            TensorError: a tensor cannot be used.
            StaleSquaresError: gradients are not those that `request.squares` were measured of.
            MissingStateError: a state is missing, and `work.creates_states` is not set.
            OutOfMemoryError: a device has no room for the tables of the step.
        """
        if not self.devices:
            self.find_devices(work)
        measures = request.measures
        try:
            done, scalars = self._measure_and_apply(work, request, measures)
        except BaseException:
            work.drop_new_states()
            raise
        skipped, norm, written, written_grads = done
        if written:  # not those that C has counted
            increment_version(written)
        if written_grads is not None:
            increment_version(written_grads)
        if request.looks_for_inf and request.found_inf is not None:
            self._write_flag(request.found_inf, scalars)
        answer = StepAnswer(skipped, norm)
        if self.devices != HOST_ONLY:
            answer = self._answer_of_devices(answer, scalars, measures)
        work.drop_new_states_if(answer.skipped)
        return answer

    def _measure_and_apply(
        self, work: Work, request: StepRequest, measures: bool
    ) -> tuple[_Done, dict[int, Scalars]]:
        while True:
            try:
                rules, phase = work.rules(), _Phase.WHOLE
                if measures and len(self.devices) > 1:
                    scalars, phase = self._scalars(request, True, apart=True), _Phase.APPLY
                    work.run(self._plan, rules, request, scalars, _Phase.MEASURE)
                    scalars = agree(scalars)
                else:
                    scalars = self._scalars(request, measures and work.wants_norm)
                return work.run(self._plan, rules, request, scalars, phase), scalars
            except _DevicesChangedError as changed:
                self.devices = changed.devices

    def _scalars(
        self, request: StepRequest, wants_norm: bool, apart: bool = False
    ) -> dict[int, Scalars]:
        """The scale and the flag on every device in use, and room for the norm.

        Where devices measure `apart`, each has a flag and a float64 norm of its own.
        """
        if request.grad_scale is request.found_inf is None and not (wants_norm or apart):
            return dict.fromkeys(self.devices, _NO_SCALARS)
        scalars = {}
        for device in self.devices:
            flag = None if request.found_inf is None else on_device(request.found_inf, device)
            if apart and (flag is None or request.looks_for_inf):
                flag = new_scalar(device, torch.float32)
            scale = None if request.grad_scale is None else on_device(request.grad_scale, device)
            norm = None
            if apart:
                norm = new_scalar(device, torch.float64)
            elif wants_norm and device != HOST:
                norm = self._norm_on(device)
            scalars[device] = Scalars(scale, flag, norm)
        return scalars

    def _norm_on(self, device: int) -> Tensor:
        """Where a device writes its norm in every step: a CUDA graph may remember the place."""
        if device not in self._norms:
            self._norms[device] = new_scalar(device, torch.float64)
        return self._norms[device]

    def _write_flag(self, found_inf: Tensor, scalars: dict[int, Scalars]) -> None:
        """Write what was found to the scaler's flag, where a copy of it was sent to a device."""
        flag = next(iter(scalars.values())).found_inf
        if flag is not None and flag is not found_inf:
            found_inf.copy_(flag, non_blocking=True)

    def _answer_of_devices(
        self, answer: StepAnswer, scalars: dict[int, Scalars], measures: bool
    ) -> StepAnswer:
        """Where the devices have written what they found."""
        first = next(iter(scalars.values()))
        skipped = answer.skipped if first.found_inf is None else first.found_inf
        return StepAnswer(skipped, first.norm if measures else answer.norm)
