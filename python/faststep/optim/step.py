"""One step of an optimizer: measure, agree, apply.

Where all parameters lie on one device, a single call measures the gradients (if they are clipped or
checked) and applies the update. Where they lie on several, the devices have to agree on the norm
and on whether a gradient was infinite: one call measures on each device, the results are put
together, and another call applies the update with them. So it is where parameters are DTensors, of
which each rank has a part: then the ranks have to agree.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._devices import HOST, HOST_ONLY, devices_of
from .._torch.dtensor import learn_dtensors
from .._torch.optim import increment_version
from .divided_grads import DividedGrads, MeasurePart
from .plan_step import (
    DevicesChangedError,
    DividedError,
    Done,
    Phase,
    PlanStep,
    Scalars,
    agree,
    new_scalar,
    on_device,
)
from .request import Rule, StepAnswer, StepRequest

_NO_SCALARS = {HOST: Scalars(None, None, None)}


def loss_of(closure: Callable[[], Any]) -> Any:
    """Return what the closure of a step returns; it may run backward."""
    with torch.enable_grad():
        return closure()


def wait_for_states(optimizer: Any) -> None:
    """Return when the last step of an optimizer has updated all states."""
    if optimizer._stepper is not None:
        optimizer._stepper.wait()


def states_on_host(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, parameters are where their states are, if `faststep.offload` has these."""
    stepper = optimizer._stepper
    return contextlib.nullcontext() if stepper is None else stepper.on_host(optimizer)


class Stepper:
    """Steps parameters by one `_C.Plan`, which remembers them between steps."""

    def __init__(self, plan: _C.Plan | None = None) -> None:
        self._plan = _C.Plan() if plan is None else plan
        self._norms: dict[int, Tensor] = {}  # per CUDA device: where it writes the norm
        self._divided: DividedGrads | None = None  # if parameters are divided over ranks
        self.devices: tuple[int, ...] = ()  # of the parameters of the last step

    @property
    def applied(self) -> int:
        """How many steps have updated parameters."""
        return self._plan.applied

    def forget(self) -> None:
        """Let go of the tensors of earlier steps."""
        self._plan.forget()
        self._divided = None

    def wait(self) -> None:
        """Return when the last step has updated all states."""

    def leave_to_torch(self) -> None:
        """Let torch's operators make a step, or raise."""

    def on_host(self, optimizer: Any) -> contextlib.AbstractContextManager[None]:
        """What saving and loading the optimizer's states runs in."""
        return contextlib.nullcontext()

    def divide(self) -> None:
        """Agree with other ranks from now on, also without DTensors."""
        if self._divided is None:
            self._divided = DividedGrads()

    def find_devices(self, plan_step: PlanStep) -> None:
        """Set `devices` before the first step."""
        learn_dtensors()
        self.devices = devices_of(param for params in plan_step.params for param in params)

    def ranks_have_grads(self) -> bool:
        """True if another rank had a gradient at the last step that measured DTensors."""
        return self._divided is not None and self._divided.ranks_have_grads()

    def step(self, plan_step: PlanStep, request: StepRequest) -> StepAnswer:
        """Update all parameters of `plan_step` that have a gradient, or none of them.

        Raises:
            TensorError: a tensor cannot be used.
            OutOfMemoryError: a device has no room for the tables of the step.
        """
        if not self.devices:
            self.find_devices(plan_step)
        applied = self._plan.applied
        try:
            done, scalars = self._measure_and_apply(plan_step, request)
        except BaseException:
            if self._plan.applied == applied:  # not by a signal that came during the update
                if self.devices == HOST_ONLY:
                    plan_step.restore_states()
                else:  # a device may have updated its parameters before another one failed
                    plan_step.drop_new_states()
            raise
        skipped, norm, written, written_grads = done
        if written:  # not those that C has counted
            increment_version(written)
        if written_grads is not None:
            increment_version(written_grads)
        if request.looks_for_inf and (found_inf := request.found_inf) is not None:
            flag = next(iter(scalars.values())).found_inf
            if flag is not None and flag is not found_inf:  # a copy of it was sent to a device
                found_inf.copy_(flag, non_blocking=True)
        answer = StepAnswer(skipped, norm)
        if self.devices != HOST_ONLY:
            answer = self._answer_of_devices(answer, scalars, request.measures)
        if request.is_tried and answer.skipped:
            plan_step.restore_states()
        elif plan_step.new:
            plan_step.drop_new_states_if(answer.skipped)
        return answer

    def _measure_and_apply(
        self, plan_step: PlanStep, request: StepRequest
    ) -> tuple[Done, dict[int, Scalars]]:
        while True:
            try:
                rules = plan_step.rules()
                if request.norm is not None:
                    known = request.grad_scale, request.found_inf, request.norm
                    scalars, phase = {}, Phase.APPLY
                    for device in self.devices:
                        scalars[device] = Scalars(*(on_device(one, device) for one in known))
                elif self._divided is not None and request.measures:
                    scalars = self._agree_with_ranks(plan_step, request)
                    return self._applied(plan_step, rules, request, scalars), scalars
                elif len(self.devices) > 1 and request.measures:
                    scalars, phase = self._scalars(request, apart=True), Phase.APPLY
                    plan_step.run(self._plan, rules, request, scalars, Phase.MEASURE)
                    scalars = agree(scalars)
                else:
                    scalars, phase = self._scalars(request, plan_step.wants_norm), Phase.WHOLE
                return plan_step.run(self._plan, rules, request, scalars, phase), scalars
            except DevicesChangedError as changed:
                self.devices = changed.devices
            except DividedError:
                self._divided = DividedGrads()
            except _C.TensorError:
                if learn_dtensors():
                    continue
                # Maybe before the plan came to a DTensor; then the other ranks measure, and wait.
                measures = request.measures and self._divided is None
                if not measures or not plan_step.has_dtensors():
                    raise
                self._divided = DividedGrads()

    def _agree_with_ranks(self, plan_step: PlanStep, request: StepRequest) -> dict[int, Scalars]:
        """The norm and the flag of all ranks."""
        measure_part = functools.partial(self._measure_part, request)
        return self._measured_by_ranks(plan_step, self.devices[0], measure_part)

    def _measured_by_ranks(
        self, plan_step: PlanStep, device: int, measure_part: MeasurePart
    ) -> dict[int, Scalars]:
        self._divided = self._divided or DividedGrads()
        return self._divided.measure(plan_step, device, measure_part)

    def _measure_part(
        self, request: StepRequest, plan: _C.Plan, part: PlanStep
    ) -> dict[int, Scalars]:
        """What a plan measures of the gradients of a region."""
        scalars = self._scalars(request, apart=True)
        part.run(plan, part.rules(), request, scalars, Phase.MEASURE)
        return scalars

    def _applied(
        self,
        plan_step: PlanStep,
        rules: list[Rule],
        request: StepRequest,
        scalars: dict[int, Scalars],
    ) -> Done:
        """Apply what was agreed on; the plan has not seen the norm."""
        skipped, _, written, grads = plan_step.run(self._plan, rules, request, scalars, Phase.APPLY)
        norm = scalars[HOST].norm if self.devices == HOST_ONLY else None
        seen = norm is not None and (request.looks_for_inf or not skipped)
        return skipped, float(norm) if seen and norm is not None else None, written, grads

    def _scalars(
        self, request: StepRequest, wants_norm: bool = False, apart: bool = False
    ) -> dict[int, Scalars]:
        """The scale and the flag on every device in use, and room for the norm where one measures.

        Where devices measure `apart`, each has a flag and a float64 norm of its own. In host memory
        the plan answers with the norm.
        """
        has_scaler = request.grad_scale is not None or request.found_inf is not None
        if self.devices == HOST_ONLY and not (has_scaler or apart):
            return _NO_SCALARS
        scalars = {}
        for device in self.devices:
            flag, norm = request.found_inf, None
            if apart:
                norm = new_scalar(device, torch.float64)
                if flag is None or request.looks_for_inf:
                    flag = new_scalar(device, torch.float32)
            elif wants_norm and device != HOST and request.measures:
                norm = self._norm_on(device)
            scale = on_device(request.grad_scale, device)
            scalars[device] = Scalars(scale, on_device(flag, device), norm)
        return scalars

    def _norm_on(self, device: int) -> Tensor:
        """Where a device writes its norm in every step: a CUDA graph may remember the place."""
        if device not in self._norms:
            self._norms[device] = new_scalar(device, torch.float64)
        return self._norms[device]

    def _answer_of_devices(
        self, answer: StepAnswer, scalars: dict[int, Scalars], measures: bool
    ) -> StepAnswer:
        """Where the devices have written what they found."""
        first = next(iter(scalars.values()))
        skipped = answer.skipped if first.found_inf is None else first.found_inf
        return StepAnswer(skipped, first.norm if measures else answer.norm)
