"""The calls of `_C.Plan` for a step, their scalars, and the states that are created on the way.

No other module of the package talks to a plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import _C
from .._devices import HOST, ordinal_of
from .._torch.dtensor import any_dtensor
from .._torch.optim import is_capturing
from ..grads.dtensors import LayoutError, align, align_states, wait_for
from .by_torch import LeftToTorchError
from .codes import SCALES, are_codes
from .masters import MASTER, begin_state, keys_for, own_keys
from .request import Rule, Steppable, StepRequest

_NO_CLIPPING = math.nan


class DevicesChangedError(Exception):
    """Parameters lie on other devices than at the last step; nothing was updated."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        super().__init__(devices)
        self.devices = devices


class DividedError(Exception):
    """Parameters are DTensors, so that the ranks have to agree; nothing was updated."""


class Phase(IntEnum):
    """The work of one call of the plan; see csrc/py/step/step_plan.h."""

    WHOLE = 0
    MEASURE = 1
    APPLY = 2


class Scalars(NamedTuple):
    """The numbers of a step that lie on one device: 0-d float32 or float64 tensors or None."""

    grad_scale: Tensor | None
    found_inf: Tensor | None
    norm: Tensor | None


def _device(number: int) -> torch.device:
    return torch.device("cpu") if number == HOST else torch.device("cuda", number)


def new_scalar(number: int, dtype: torch.dtype) -> Tensor:
    """A 0-d tensor of zero on a device."""
    return torch.zeros((), dtype=dtype, device=_device(number))


_Scalar = TypeVar("_Scalar", Tensor, "Tensor | None")


def on_device(scalar: _Scalar, number: int) -> _Scalar:
    """The tensor itself, or a copy of it on another device; waits for one only on the host."""
    if scalar is None or (scalar.is_cpu if number == HOST else ordinal_of(scalar) == number):
        return scalar
    return scalar.to(_device(number), non_blocking=number != HOST)


def all_on_host(request: StepRequest) -> StepRequest:
    """The request with its tensors in host memory."""
    scale, found, norm = request.grad_scale, request.found_inf, request.norm
    scale, found, norm = (on_device(one, HOST) for one in (scale, found, norm))
    return request._replace(grad_scale=scale, found_inf=found, norm=norm)


def agree(scalars: dict[int, Scalars]) -> dict[int, Scalars]:
    """Give each device the common norm (the root of the sum of squares) and the common flag."""
    rows = list(scalars.values())
    first = next(iter(scalars))
    norms = [on_device(row.norm, first) for row in rows if row.norm is not None]
    flags = [on_device(row.found_inf, first) for row in rows if row.found_inf is not None]
    norm = torch.stack([n.double() for n in norms]).square().sum().sqrt() if norms else None
    flag = (torch.stack([f.float() for f in flags]) != 0.0).any().float() if flags else None
    return {
        device: Scalars(row.grad_scale, on_device(flag, device), on_device(norm, device))
        for device, row in scalars.items()
    }


def refuse_half_state(optimizer: Steppable, rule: Rule, group: int, index: int) -> None:
    """Raise for a state that has begun and lacks a part, as torch's loop does."""
    param = optimizer.param_groups[group]["params"][index]
    state, keys = optimizer.state.get(param), own_keys(rule, param)
    has_codes = SCALES in keys and state and any(map(are_codes, state.values()))
    if not state or (optimizer._begins_in_parts and not has_codes):
        return
    if missing := [repr(key) for key in keys if key not in state]:
        detail = f"has no {', '.join(missing)}, only {', '.join(map(repr, state))}"
        raise _C.TensorError(group, index, "state", "key", detail)
    if none := [key for key in keys if state[key] is None]:
        raise _C.TensorError(group, index, f"state '{none[0]}'", "value", "is None")


Place = tuple[int, int]  # a list of parameters or a group, and the index in it

# What the plan found and wrote: (skipped, norm, tensors written, gradients written).
Done = tuple[bool, float | None, list[Tensor], list[Tensor] | None]


class PlanStep:
    """Some or all parameters of an optimizer, how to step them, and the states made for one step.

    Attributes:
        new: the places of the states that were created; None: no state.

    Args:
        params: lists of parameters.
        rules: gives a rule per list; asked again where devices have changed.
        groups: the group of each list. Default: None, all groups in their order.
        wants_norm: True if the answer needs the norm of a step on a device. Default: True.
        unchanged: ends the error that memory ran out.
    """

    __slots__ = (
        "_before",
        "_has_emptied_cache",
        "groups",
        "new",
        "optimizer",
        "params",
        "rules",
        "unchanged",
        "wants_norm",
    )

    def __init__(
        self,
        optimizer: Steppable,
        params: list[list[Tensor]],
        rules: Callable[[], list[Rule]],
        groups: list[int] | None = None,
        wants_norm: bool = True,
        unchanged: str = "nothing was updated",
    ) -> None:
        self.optimizer = optimizer
        self.params = params
        self.rules = rules
        self.groups = groups
        self.wants_norm = wants_norm
        self.unchanged = unchanged
        self.new: list[Place] | None = None
        self._before: list[tuple[Tensor, dict[str, Any] | None]] = []  # what they were
        self._has_emptied_cache = False

    def run(
        self,
        plan: _C.Plan,
        rules: list[Rule],
        request: StepRequest,
        scalars: dict[int, Scalars],
        phase: Phase,
    ) -> Done:
        """Call the plan; create states that it misses, make room on a device, and call it again."""
        max_norm = _NO_CLIPPING if request.max_norm is None else request.max_norm
        looks = 2 if request.refuses_fp16 else int(request.looks_for_inf)
        while True:
            try:
                what, value = plan.step(
                    self.params,
                    rules,
                    self.optimizer.state,
                    self.new,
                    scalars,
                    looks,
                    max_norm,
                    request.write_grads,
                    phase,
                )
            except _C.TensorError as error:
                which, index, role = error.args[:3]
                grad = self.params[which][index].grad if role == "gradient" else None
                if grad is not None and wait_for(grad):
                    continue
                raise _C.TensorError(*self.place(which, index), *error.args[2:]) from None
            if what == "done":
                done: Done = value
                return done
            if what == "missing":
                self._create_states(value, rules)
            elif what == "layouts":
                self._align(plan, value, rules)
            elif what == "memory":
                self._empty_cache(value)
            elif what == "devices":
                raise DevicesChangedError(tuple(value))
            else:
                raise DividedError

    def place(self, which: int, index: int) -> Place:
        """The group, and the index in it, of a parameter of one of the lists."""
        if self.groups is None:
            return which, index
        group, param = self.groups[which], self.params[which][index]
        params = self.optimizer.param_groups[group]["params"]
        return group, next((i for i, other in enumerate(params) if other is param), index)

    def has_dtensors(self) -> bool:
        """True if one of the parameters is a DTensor."""
        return any_dtensor(itertools.chain.from_iterable(self.params))

    def _create_states(self, missing: list[Place], rules: list[Rule]) -> None:
        """Create states that were found missing; an error for those that still are."""
        optimizer, before = self.optimizer, self.new or []
        for which, index in missing:
            keys = keys_for(rules[which], self.params[which][index])
            if (which, index) in before:  # it is there, but None, or in a mapping of a script
                state = optimizer.state[self.params[which][index]]
                key = next((key for key in keys if state.get(key) is None), None)
                if key is None:
                    raise LeftToTorchError(f"a state in a {type(state).__name__}")
                place = self.place(which, index)
                raise _C.TensorError(*place, f"state '{key}'", "value", "is None")
        for which, index in missing:
            refuse_half_state(optimizer, rules[which], *self.place(which, index))
        begun = [place for place in missing if self._begins(place, rules)]
        self.new = sorted([*before, *begun])  # the first may have been dropped meanwhile
        for which, index in missing:
            param = self.params[which][index]
            known = param in optimizer.state
            self._before.append((param, dict(optimizer.state[param]) if known else None))
        with torch.no_grad():
            for which, index in missing:
                group = optimizer.param_groups[self.place(which, index)[0]]
                begin_state(optimizer, group, rules[which], self.params[which][index])

    def _begins(self, place: Place, rules: list[Rule]) -> bool:
        """True if the state begins with this step: not if it only had no master."""
        which, index = place
        param = self.params[which][index]
        state = self.optimizer.state.get(param, {})
        missing = [key for key in keys_for(rules[which], param) if state.get(key) is None]
        return missing != [MASTER] or not own_keys(rules[which], param)

    def _align(self, plan: _C.Plan, places: list[Place], rules: list[Rule]) -> None:
        """Divide gradients and states among the ranks as their parameters are."""
        first = [0, *itertools.accumulate(map(len, self.params))]
        for which, index in places:
            param = self.params[which][index]
            try:
                specs = align(param)
                state = self.optimizer.state.get(param, {})
                of_states = align_states(param, state, rules[which].state_keys)
            except LayoutError as error:
                raise _C.TensorError(*self.place(which, index), *error.args) from None
            if specs is not None:
                plan.settle(first[which] + index, *specs, of_states)

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
        if isinstance(skipped, Tensor):
            groups = self.optimizer.param_groups
            places = (self.place(which, index) for which, index in self.new or ())
            differ = any(self.optimizer._zeros_differ(groups[group]) for group, _ in places)
            skipped = differ and bool(skipped.item() != 0.0)
        if skipped:
            self.drop_new_states()

    def drop_new_states(self) -> None:
        """Undo the creation where zeros make the next step differ from a missing state."""
        for which, index in self.new or ():
            self.optimizer._drop_new_state(self.params[which][index])

    def restore_states(self) -> None:
        """Undo the creation, so that nothing shows that there was a step."""
        state = self.optimizer.state
        for param, before in self._before:
            if before is None:
                state.pop(param, None)
            else:
                state[param].clear()
                state[param].update(before)
