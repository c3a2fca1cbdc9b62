"""Makes the steps of an offloaded optimizer, and agrees with ranks that have other parts."""

from __future__ import annotations

import contextlib
import itertools
from typing import Protocol

import torch
from torch import Tensor

from .. import _C
from .._devices import HOST, HOST_ONLY, devices_of
from ..optim.base import FusedOptimizer
from ..optim.plan_step import PlanStep, Scalars, on_device
from ..optim.request import StepAnswer, StepRequest
from ..optim.step import Stepper


class Offloading(Protocol):
    """An :class:`.Offload`."""

    def prepare(self, request: StepRequest) -> StepRequest | None: ...
    def measure(self, params: list[Tensor], request: StepRequest) -> tuple[float, bool]: ...
    def step(self, request: StepRequest) -> StepAnswer | None: ...
    def end_pass(self) -> None: ...
    def wait(self) -> None: ...
    def leave_to_torch(self) -> None: ...
    def on_host(self, optimizer: FusedOptimizer) -> contextlib.AbstractContextManager[None]: ...


class HostStepper(Stepper):
    """Makes the steps of an offloaded optimizer, wherever its parameters lie on the host."""

    def __init__(self, offload: Offloading) -> None:
        super().__init__()
        self.devices = HOST_ONLY
        self._offload = offload

    def step(self, plan_step: PlanStep, request: StepRequest) -> StepAnswer:
        asked, norm = request, None
        if request.measures and request.norm is None and plan_step.has_dtensors():
            request = self._agreed(plan_step, request)
            norm = request.norm
        answer = self._offload.step(request)
        if answer is None:
            answer = super().step(plan_step, request)
        if norm is not None and (asked.looks_for_inf or not answer.skipped):
            answer = answer._replace(norm=norm.item())
        return answer

    def _agreed(self, plan_step: PlanStep, request: StepRequest) -> StepRequest:
        """The request with what all ranks have found: the norm, and a flag if the step is skipped.

        The ranks meet as in a step without offload, also where this rank cannot go on.
        """
        device = devices_of(itertools.chain.from_iterable(plan_step.params))[0]
        ready: list[StepRequest | None] = []

        def measure_part(plan: _C.Plan, part: PlanStep) -> dict[int, Scalars]:
            ready[:] = ready or [self._offload.prepare(request)]
            if ready[0] is None:
                return self._measure_part(request, plan, part)
            params = [p for some in part.params for p in some if p.grad is not None]
            norm, is_finite = self._offload.measure(params, ready[0])
            found = ready[0].found_inf
            if found is None or request.looks_for_inf:
                found = torch.tensor(float(request.looks_for_inf and not is_finite), device="cpu")
            wide = torch.tensor(norm, dtype=torch.float64, device="cpu")
            return {device: Scalars(None, found, wide)}

        try:
            with torch.no_grad():
                agreed = self._measured_by_ranks(plan_step, device, measure_part)[device]
        except BaseException:
            self._offload.end_pass()
            raise
        found, norm = on_device(agreed.found_inf, HOST), on_device(agreed.norm, HOST)
        assert found is not None
        if request.looks_for_inf and request.found_inf is not None:
            request.found_inf.copy_(found)
        found = found if bool(found != 0.0) else None
        request = (ready and ready[0]) or request
        return request._replace(looks_for_inf=False, found_inf=found, norm=norm)

    def wait(self) -> None:
        self._offload.wait()

    def leave_to_torch(self) -> None:
        self._offload.leave_to_torch()

    def forget(self) -> None:
        self._offload.wait()
        super().forget()

    def on_host(self, optimizer: FusedOptimizer) -> contextlib.AbstractContextManager[None]:
        return self._offload.on_host(optimizer)
