"""States of whole parameters and of the pieces that a rank owns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...optim.masters import fitting
from ..layout.slots import Slot
from ..step.owned import Owned
from .sliced import SlicedState

__all__ = ["cut_state", "problem_of", "whole_states"]


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
            wanted = [(b, p.numel()) for b, (p, _) in zip(slot.begins, slot.pieces, strict=True)]
            found = [(begin, values.numel()) for begin, values in value.parts]
            if wanted != found or value.stride() != slot.strides:
                return (
                    f"{key!r} of {slot.name!r} was cut for other slices; load it by "
                    "torch.distributed.checkpoint, or take whole states "
                    "(StateDictOptions(full_state_dict=True))"
                )
    return ""


def cut_state(owned: Owned, slot: Slot, state: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """This rank's part of the state of a whole parameter, by pieces."""
    numbers = ("step", *owned.optimizer._numbers)
    whole = fitting(state, slot.param, owned.optimizer._keeps_masters)
    if not whole:
        return {}
    return {
        piece: {
            key: value.parts[number][1]
            if isinstance(value, SlicedState)
            else _part(value, slot, begin, piece.numel(), key in numbers)
            for key, value in whole.items()
        }
        for number, ((piece, _), begin) in enumerate(zip(slot.pieces, slot.begins, strict=True))
    }


def _part(value: Any, slot: Slot, begin: int, count: int, is_number: bool) -> Any:
    """A piece of a state that has the parameter's shape, a copy of another one."""
    if not isinstance(value, Tensor):
        return value
    if is_number or value.shape != slot.shape:
        return value.clone()
    return slot.cut(value, begin, count).clone()
