"""Requests to a step, rules of groups, and answers of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import _C
from .param_shards import Shards
from .state_kinds import StateKinds
from .zeros import Zeros

_RULES = _C.rules()


def check_limit(name: str, value: float | None) -> None:
    """Raise ValueError for a negative or NaN limit; None is no limit."""
    if value is not None and not value >= 0.0:
        raise ValueError(f"Invalid {name} value: {value}")


def has_grads(optimizer: Optimizer) -> bool:
    """True if any parameter has a gradient."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def refuse_unchecked(optimizer: Optimizer) -> None:
    """Raise for gradients that came after the scaler had looked for some, and found none."""
    if has_grads(optimizer):
        raise AssertionError("No inf checks were recorded for this optimizer.")


class ScalerRequest(TypedDict, total=False):
    """Requests of faststep's GradScaler, beside torch's `grad_scale` and `found_inf`."""

    looks_for_inf: bool  # the step checks the gradients, and writes `found_inf`
    refuses_fp16: bool  # as torch's `unscale_` refuses float16 gradients
    max_norm: float | None  # takes the place of the optimizer's `max_grad_norm`


class StepRequest(NamedTuple):
    """The parts of one step beside the update."""

    grad_scale: Tensor | None = None  # gradients are divided by it; 0-d
    found_inf: Tensor | None = None  # the step is skipped where it is not 0; 0-d
    looks_for_inf: bool = False  # the step checks the gradients, and writes `found_inf`
    max_norm: float | None = None  # gradients are clipped to this global 2-norm
    write_grads: bool = False  # unscaled and clipped gradients are written back to `.grad`
    refuses_fp16: bool = False  # where it looks: float16 gradients are an error
    is_tried: bool = False  # at an overflow the states are what they were before
    norm: Tensor | None = None  # of all gradients, float64 and 0-d: the step measures nothing

    @property
    def measures(self) -> bool:
        """True if all gradients are read before the first parameter is written."""
        return self.looks_for_inf or self.max_norm is not None


_NOTHING = StepRequest()


def request_of(
    optimizer: Optimizer,
    max_grad_norm: float | None,
    keep_grads: bool,
    looks_for_inf: bool = False,
    refuses_fp16: bool = False,
    max_norm: float | None = None,
) -> StepRequest:
    """The request to a step: by the optimizer's options, by torch's protocol, by ours.

    torch's protocol are the attributes `grad_scale` and `found_inf`, which a scaler sets for the
    time of a step. They are read here alone. The last three are those of a `ScalerRequest`.

    Raises:
        AssertionError: torch's scaler saw no gradient, and there is one.
        ValueError: the optimizer's limit of the norm is negative or NaN.
    """
    if max_norm is None and max_grad_norm is not None:
        check_limit("max_grad_norm", max_grad_norm)
        max_norm = max_grad_norm
    grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    found_inf: Any = getattr(optimizer, "found_inf", None)
    if found_inf is not None and not isinstance(found_inf, Tensor):
        refuse_unchecked(optimizer)  # torch's scaler passes the number 0 where it saw no gradient
        found_inf = None
    if grad_scale is found_inf is max_norm is None and not looks_for_inf:
        return _NOTHING
    write_grads = grad_scale is not None if max_norm is None else keep_grads
    return StepRequest(grad_scale, found_inf, looks_for_inf, max_norm, write_grads, refuses_fp16)


def step_with(
    optimizer: Optimizer, lent: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `optimizer.step`, with attributes that are set for that time; returns its result.

    After the step they are deleted, as by torch's scaler. If the step raises, the earlier values
    (a `grad_scale` of the user) are restored, so that the step can be tried again.
    """
    own = vars(optimizer)
    before = {name: own[name] for name in lent if name in own}
    for name, value in lent.items():
        setattr(optimizer, name, value)
    try:
        result = optimizer.step(*args, **kwargs)
        before.clear()
        return result
    finally:
        for name in lent.keys() & own.keys():  # the step may have removed some itself
            delattr(optimizer, name)
        for name, value in before.items():
            setattr(optimizer, name, value)


class StepAnswer(NamedTuple):
    """The findings of a step.

    On a CUDA device the values are tensors: the step has not waited for the device.
    """

    skipped: bool | Tensor  # a tensor that is not 0 where the step was skipped
    norm: float | Tensor | None  # before clipping; None where nothing was measured


class Rule(NamedTuple):
    """How one parameter group is stepped; the C side reads it by position."""

    number: int
    state_keys: tuple[str, ...]  # "step" first where has_step, then the states in the rule's order
    has_step: bool
    hyper: tuple[float, ...]  # in the order of FST_..._HYPER in the rule's header, lr first
    maximize: bool
    lr: dict[int, Tensor] | None = None  # per CUDA device: read there instead of from `hyper`
    has_master: bool = False  # `state_keys` end with that of the masters; see masters.py
    has_remainder: bool = False  # they are remainders
    noise_seed: int | None = None  # by this noise bf16 states are rounded
    codes_from: int = 0  # elements of the smallest parameter with states in codes; 0: none has
    shards: Shards | None = None  # parameters that are parts of whole ones


class Formula(NamedTuple):
    """A rule of csrc/rules/rules.def, and what it needs of a group and of a parameter's state."""

    number: int
    places: tuple[str | tuple[str, int], ...]  # of the hyper-parameters in a group, lr first
    state_keys: tuple[str, ...]  # as in Rule
    has_step: bool


def formula(rule: str, *state_keys: str) -> Formula:
    """The rule of that name, with states of these names in its order, after "step" if it counts."""
    number, _, hyper = _RULES[rule]
    parts = (name.partition("[") for name in hyper)
    places = tuple((key, int(index[:-1])) if index else key for key, _, index in parts)
    return Formula(number, places, state_keys, "step" in state_keys)


class Leaving(Protocol):
    """A stepper, as far as torch's operators care."""

    def leave_to_torch(self) -> None:
        """Let torch's operators make a step, or raise."""


class Steppable(Protocol):
    """A fused optimizer, as the modules below base.py know it."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]
    defaults: dict[str, Any]
    _keeps_masters: bool
    _has_remainders: bool
    _kinds: StateKinds
    _made_from: ClassVar[Any]
    _shards: Shards | None
    _divided_shards: tuple[list[Tensor], list[Any], Shards] | None
    _code_dtypes: ClassVar[Mapping[str, torch.dtype]]
    _numbers: ClassVar[tuple[str, ...]]
    _counts_on_device: ClassVar[bool]
    _begins_in_parts: ClassVar[bool]

    @property
    def _stepper(self) -> Leaving | None: ...
    @property
    def _zeros(self) -> Zeros: ...
    def _rules(self) -> list[Rule]: ...
    def _formula_of(self, group: dict[str, Any]) -> Formula: ...
    def _is_divided_by_fsdp1(self) -> bool: ...
    def _new_state(self, group: dict[str, Any], rule: Rule, param: Tensor) -> None: ...
    def _drop_new_state(self, param: Tensor) -> None: ...
    def _zeros_differ(self, group: dict[str, Any]) -> bool: ...
    @classmethod
    def _state_names(cls) -> tuple[str, ...]: ...
    def _explained(
        self, group: int, index: int, role: str, kind: str, detail: str
    ) -> Exception: ...
    def _update_by_torch(self) -> None: ...
