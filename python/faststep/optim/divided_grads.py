"""Measures gradients that are divided among ranks, and agrees with the other ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._torch.dtensor import specs_of
from ..grads.agreement import Agreed, over_ranks
from ..grads.dtensors import LayoutError
from ..grads.regions import Region, groups_of, regions_of
from .param_shards import are_same
from .plan_step import DevicesChangedError, PlanStep, Scalars, agree, new_scalar, on_device
from .request import Rule

# A rule without states: the plans that measure need none. They apply nothing.
_NO_RULE = Rule(_C.rules()["sgd"][0], (), False, (0.0,) * 5, False)

MeasurePart = Callable[[_C.Plan, PlanStep], dict[int, Scalars]]


class _Part(NamedTuple):
    """A region of an optimizer's parameters, and the plan that measures their gradients.

    It knows no optimizer: that keeps it, and would be freed by the garbage collector alone.
    """

    plan: _C.Plan
    params: list[list[Tensor]]


class DividedGrads:
    """The regions of the parameters of one optimizer, some of which are DTensors."""

    def __init__(self) -> None:
        self._grads: Tensor | None = None  # not 0 if a rank had a gradient at the last step
        self._params: list[Tensor] = []
        self._specs: list[Any] = []
        self._regions: list[Region] = []
        self._parts: list[_Part] = []

    def measure(
        self,
        plan_step: PlanStep,
        device: int,
        measure_part: MeasurePart,
    ) -> dict[int, Scalars]:
        """The norm of all gradients and the flag of all ranks, for each device in use.

        A rank that fails takes part, so that the others raise an error as well.

        Args:
            device: the first in use.
            measure_part: measures the gradients of a part of the parameters by a plan.
        """
        self._follow(plan_step)
        failure = None
        rows: list[dict[int, Scalars]] = []
        try:
            for part in self._parts:
                rows.append(measure_part(part.plan, _part_of(part.params, plan_step)))
        except DevicesChangedError:  # this rank measures again
            raise
        except Exception as error:
            failure = error
        agreed = self._agreed(plan_step, device, rows, failure)
        if failure is not None:
            raise _explained(plan_step, failure) if agreed.fails_alone else failure
        found = agreed.found.ne(0.0).float()
        norm = agreed.values.sum().sqrt()
        return {
            at: Scalars(row.grad_scale, on_device(found, at), on_device(norm, at))
            for at, row in rows[0].items()
        }

    def _agreed(
        self,
        plan_step: PlanStep,
        device: int,
        rows: list[dict[int, Scalars]],
        failure: Exception | None,
    ) -> Agreed:
        """The findings of all ranks; without rows where this rank has failed."""
        for row in rows:
            if len(row) > 1:
                row.update(agree(row))
        if failure is None:
            norms = [on_device(_of(row[device].norm), device).double() for row in rows]
            flags = [on_device(_of(row[device].found_inf), device).double() for row in rows]
        else:
            norms = [new_scalar(device, torch.float64).fill_(math.nan)] * len(self._regions)
            flags = [new_scalar(device, torch.float64)]
        agreed = over_ranks(
            self._regions,
            torch.stack(norms).square(),
            torch.stack(flags).ne(0.0).any(),
            has_grads=any(param.grad is not None for param in self._params),
            failure=None if failure is None else str(_explained(plan_step, failure)),
        )
        self._grads = agreed.grads
        return agreed

    def ranks_have_grads(self) -> bool:
        """True if a rank had a gradient at the last step that measured; waits for a device."""
        return self._grads is not None and bool(self._grads != 0.0)

    def _follow(self, plan_step: PlanStep) -> None:
        """Find the regions anew, if the parameters or how they are divided have changed."""
        params = list(itertools.chain.from_iterable(plan_step.params))
        specs = specs_of(params)
        if are_same(params, self._params) and are_same(specs, self._specs):
            return
        try:
            self._regions = regions_of(params)
        except LayoutError as error:
            raise _C.TensorError(*_first_outside(plan_step), *error.args) from None
        self._params, self._specs = params, specs
        lists = [_in_region(plan_step.params, set(region.places)) for region in self._regions]
        self._parts = [_Part(_C.Plan(), some) for some in lists]


def _explained(plan_step: PlanStep, failure: Exception) -> Exception:
    """The error that the optimizer's step raises for it."""
    if isinstance(failure, _C.TensorError):
        return plan_step.optimizer._explained(*failure.args)
    return failure


def _of(scalar: Tensor | None) -> Tensor:
    assert scalar is not None
    return scalar


def _first_outside(plan_step: PlanStep) -> tuple[int, int]:
    """The place of the first parameter without a known part on this rank."""
    for which, params in enumerate(plan_step.params):
        for index, param in enumerate(params):
            try:
                groups_of(param)
            except LayoutError:
                return plan_step.place(which, index)
    raise AssertionError("every parameter has a part on this rank")


def _in_region(params: list[list[Tensor]], places: set[int]) -> list[list[Tensor]]:
    """Those of the parameters that have these places among all."""
    lists, first = [], 0
    for some in params:
        lists.append([p for at, p in enumerate(some, first) if at in places])
        first += len(some)
    return lists


def _part_of(params: list[list[Tensor]], plan_step: PlanStep) -> PlanStep:
    """The same of some of the parameters, to measure them."""
    groups = list(range(len(params))) if plan_step.groups is None else plan_step.groups
    rules = [_NO_RULE] * len(params)
    return PlanStep(
        plan_step.optimizer, params, lambda: rules, groups, unchanged=plan_step.unchanged
    )
