"""States of whole parameters, and of the parts that a rank owns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...optim.base import FusedOptimizer
from ...optim.masters import fitting
from ..layout.slots import Slot
from .sliced import SlicedState


def whole_states(
    states: Mapping[Tensor, dict[str, Any]], keeps_masters: bool = False
) -> defaultdict[Tensor, dict[str, Any]]:
    """The states of another optimizer, as one that begins with them."""
    return defaultdict(
        dict, {param: fitting(state, param, keeps_masters) for param, state in states.items()}
    )


def problem_of(slot: Slot, state: Mapping[str, Any]) -> str:
    """Why the state of a parameter cannot be cut for this rank; "" if it can."""
    for key, value in state.items():
        if not isinstance(value, Tensor) or key == "step" or not value.dim():
            continue
        if value.shape != slot.param.shape:
            return (
                f"{key!r} of {slot.name!r} has the shape {tuple(value.shape)}, and the parameter "
                f"{tuple(slot.param.shape)}"
            )
        if isinstance(value, SlicedState):
            wanted = slot.part and (slot.part.begin, slot.part.values.numel())
            found = value.part and (value.part[0], value.part[1].numel())
            if wanted != found or value.stride() != slot.strides:
                return (
                    f"{key!r} of {slot.name!r} was cut for other slices; load it by "
                    "torch.distributed.checkpoint, or take whole states "
                    "(StateDictOptions(full_state_dict=True))"
                )
    return ""


def cut_state(
    fused: FusedOptimizer, slot: Slot, state: Mapping[str, Any]
) -> dict[Tensor, dict[str, Any]]:
    """This rank's part of the state of a whole parameter, by its part of the parameter."""
    whole = fitting(state, slot.param, fused._keeps_masters)
    if not whole or slot.part is None:
        return {}
    numbers = ("step", *fused._numbers)
    return {slot.part.values: {k: _part_of(v, slot, k in numbers) for k, v in whole.items()}}


def _part_of(value: Any, slot: Slot, is_number: bool) -> Any:
    """A part of a state that has the parameter's shape, a copy of another one."""
    if isinstance(value, SlicedState):
        return value.part and value.part[1]
    if not isinstance(value, Tensor):
        return value
    return (value if is_number or value.shape != slot.shape else slot.cut(value)).clone()
