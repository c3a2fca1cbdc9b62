"""One step of an optimizer: measure, agree, apply. No other module talks to `_C.Plan`.

Where all parameters lie on one device, a single call measures the gradients (if they are clipped or
checked) and applies the update. Where they lie on several, the devices have to agree on the norm
and on whether a gradient was infinite: one call measures on each device, the results are put
together, and another call applies the update with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._devices import HOST, HOST_ONLY, Scalars, agree, devices_of, new_scalar, on_device
from .._torch.optim import increment_version, is_capturing
from ..grads.shards import LayoutError, align, wait_for
from .measure import DividedGrads
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


class _DividedError(Exception):
    """Parameters are DTensors, so that the ranks have to agree; nothing was updated."""


class _Phase(IntEnum):
    """What one call of the plan does; see csrc/py/step/step_plan.h."""

    WHOLE = 0
    MEASURE = 1
    APPLY = 2


class Work(NamedTuple):
    """Some or all parameters of an optimizer, and how to step them."""

    optimizer: FusedOptimizer
    params: list[list[Tensor]]
    rules: Callable[[], list[Rule]]  # one per list; asked again where devices have changed
    groups: list[int] | None = None  # the group of each list; None: all groups, in their order
    creates_states: bool = True
    wants_norm: bool = True  # whether the answer needs the norm of a step on a device
    unchanged: str = "nothing was updated"  # for the error that memory ran out

    def place(self, which: int, index: int) -> tuple[int, int]:
        """The group, and the index in it, of a parameter of one of the lists."""
        if self.groups is None:
            return which, index
        group, param = self.groups[which], self.params[which][index]
        params = self.optimizer.param_groups[group]["params"]
        return group, next((i for i, other in enumerate(params) if other is param), index)


# What the plan found and wrote: (skipped, norm, tensors written, gradients written).
_Done = tuple[bool, float | None, list[Tensor], list[Tensor] | None]


class Stepper:
    """Steps parameters by one `_C.Plan`, which remembers them between steps."""

    def __init__(self, plan: _C.Plan | None = None) -> None:
        self._plan = _C.Plan() if plan is None else plan
        self._norms: dict[int, Tensor] = {}  # per CUDA device: where it writes the norm
        self._divided: DividedGrads | None = None  # if there are DTensors among the parameters
        self.devices: tuple[int, ...] = ()  # of the parameters of the last step

    def forget(self) -> None:
        """Let go of the tensors of earlier steps."""
        self._plan.forget()
        self._divided = None

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
        calls = _Calls(self._plan, work, request)
        measures = request.measures
        try:
            done, scalars = self._measure_and_apply(calls, request, measures)
        except BaseException:
            calls.drop_new_states()
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
        if calls.new and calls.are_new_states_void(answer.skipped):
            calls.drop_new_states()
        return answer

    def _measure_and_apply(
        self, calls: _Calls, request: StepRequest, measures: bool
    ) -> tuple[_Done, dict[int, Scalars]]:
        while True:
            try:
                calls.rules = calls.work.rules()
                if measures and self._divided is not None:
                    scalars = self._agree_with_ranks(self._divided, calls.work, request)
                    return self._applied(calls, request, scalars), scalars
                if measures and len(self.devices) > 1:
                    scalars = agree(self._measure(calls, request))
                    return calls.run(scalars, _Phase.APPLY), scalars
                scalars = self._scalars(request, measures and calls.work.wants_norm)
                return calls.run(scalars, _Phase.WHOLE), scalars
            except _DevicesChangedError as changed:
                self.devices = changed.devices
            except _DividedError:
                self._divided = DividedGrads()

    def _agree_with_ranks(
        self, divided: DividedGrads, work: Work, request: StepRequest
    ) -> dict[int, Scalars]:
        """The norm and the flag of all ranks."""
        alone = request._replace(squares=None)

        def measure_part(plan: _C.Plan, part: Work) -> dict[int, Scalars]:
            calls = _Calls(plan, part, alone)
            calls.rules = part.rules()
            return self._measure(calls, alone)

        return divided.measure(work, measure_part)

    def _applied(self, calls: _Calls, request: StepRequest, scalars: dict[int, Scalars]) -> _Done:
        """Apply what was agreed on; the plan has not seen the norm."""
        skipped, _, written, grads = calls.run(scalars, _Phase.APPLY)
        norm = scalars[HOST].norm if self.devices == HOST_ONLY else None
        seen = norm is not None and (request.looks_for_inf or not skipped)
        return skipped, float(norm) if seen and norm is not None else None, written, grads

    def _measure(self, calls: _Calls, request: StepRequest) -> dict[int, Scalars]:
        """Each device's own norm and flag."""
        scalars = self._scalars(request, True, apart=True)
        calls.run(scalars, _Phase.MEASURE)
        return scalars

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


class _Calls:
    """The calls of the plan for one step, and the states that were created for it."""

    __slots__ = ("_has_emptied_cache", "_options", "_plan", "_squares", "new", "rules", "work")

    def __init__(self, plan: _C.Plan, work: Work, request: StepRequest) -> None:
        self.work = work
        self.rules: list[Rule] = []
        self.new: list[tuple[int, int]] = []  # places of the states
        self._plan = plan
        self._has_emptied_cache = False
        max_norm = _NO_CLIPPING if request.max_norm is None else request.max_norm
        self._options = (request.looks_for_inf, max_norm, request.write_grads)
        self._squares = request.squares

    def run(self, scalars: dict[int, Scalars], phase: _Phase) -> _Done:
        """Call the plan until nothing that could be had is missing."""
        work = self.work
        while True:
            try:
                what, value = self._plan.step(
                    work.params,
                    self.rules,
                    work.optimizer.state,
                    self.new or None,
                    scalars,
                    *self._options,
                    phase,
                    self._squares,
                )
            except _C.TensorError as error:
                which, index, role = error.args[:3]
                grad = work.params[which][index].grad if role == "gradient" else None
                if grad is not None and wait_for(grad):
                    continue
                raise _C.TensorError(*work.place(which, index), *error.args[2:]) from None
            if what == "done":
                done: _Done = value
                return done
            if what == "missing":
                self._create_states(value)
            elif what == "layouts":
                self._align_grads(value)
            elif what == "memory":
                self._empty_cache(value)
            elif what == "devices":
                raise _DevicesChangedError(tuple(value))
            elif what == "divided":
                raise _DividedError
            else:
                raise StaleSquaresError

    def _create_states(self, missing: list[tuple[int, int]]) -> None:
        """Create states that were found missing; an error for those that still are."""
        work, optimizer = self.work, self.work.optimizer
        if not work.creates_states:
            raise MissingStateError
        for which, index in missing:
            keys = self.rules[which].state_keys
            if (which, index) in self.new:  # it is there, but None
                state = optimizer.state[work.params[which][index]]
                key = next(key for key in keys if state.get(key) is None)
                place = work.place(which, index)
                raise _C.TensorError(*place, f"state '{key}'", "value", "is None")
        for which, index in missing:
            optimizer._refuse_half_state(*work.place(which, index), self.rules[which].state_keys)
        self.new = sorted([*self.new, *missing])  # the first may have been dropped meanwhile
        with torch.no_grad():
            for which, index in missing:
                group = optimizer.param_groups[work.place(which, index)[0]]
                optimizer._new_state(group, work.params[which][index])

    def _align_grads(self, places: list[tuple[int, int]]) -> None:
        """Divide gradients among the ranks as their parameters are."""
        work = self.work
        first = [0, *itertools.accumulate(map(len, work.params))]
        for which, index in places:
            try:
                specs = align(work.params[which][index])
            except LayoutError as error:
                raise _C.TensorError(*work.place(which, index), *error.args) from None
            if specs is not None:
                self._plan.settle(first[which] + index, *specs)

    def _empty_cache(self, reason: str) -> None:
        """Have torch give back device memory that nobody uses, once."""
        if self._has_emptied_cache or is_capturing():
            raise torch.OutOfMemoryError(f"{reason}; {self.work.unchanged}")
        self._has_emptied_cache = True
        torch.cuda.empty_cache()

    def are_new_states_void(self, skipped: bool | Tensor) -> bool:
        """Whether the step was skipped, so that new states have to go; may wait for a device.

        It waits only where zeros and no state give different next steps.
        """
        if not isinstance(skipped, Tensor):
            return skipped
        groups = self.work.optimizer.param_groups
        places = (self.work.place(which, index) for which, index in self.new)
        differ = any(self.work.optimizer._zeros_differ(groups[group]) for group, _ in places)
        return differ and bool(skipped.item() != 0.0)

    def drop_new_states(self) -> None:
        """Undo the creation where zeros and no state give different next steps."""
        for which, index in self.new:
            self.work.optimizer._drop_new_state(self.work.params[which][index])
