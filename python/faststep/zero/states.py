"""States of whole parameters and of the pieces that a rank owns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .engine import Engine

__all__ = ["cut_states", "in_order_of_memory", "whole_states"]


def whole_states(states: Mapping[Tensor, dict[str, Any]]) -> defaultdict[Tensor, dict[str, Any]]:
    """The states of another optimizer, as one that begins with them."""
    return defaultdict(dict, {param: dict(state) for param, state in states.items()})


def cut_states(engine: Engine, states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Give this rank's optimizer its part of the states of whole parameters."""
    mine = engine.owned.optimizer.state
    mine.clear()
    for slot in engine.slots:
        whole = states.get(slot.param)
        if not whole:
            continue
        for (piece, _), begin in zip(slot.pieces, slot.begins, strict=True):
            mine[piece] = {
                key: _part(key, value, slot.param, begin, piece.numel())
                for key, value in whole.items()
            }
    sharded = {id(slot.param) for slot in engine.slots}
    engine.frozen_states = {
        param: state for param, state in states.items() if id(param) not in sharded
    }
    engine.owned.forget()


def _part(key: str, value: Any, param: Tensor, begin: int, count: int) -> Any:
    """A piece of a state that has the parameter's shape, a copy of another one."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" or value.shape != param.shape:
        return value.clone()
    return in_order_of_memory(value, param)[begin : begin + count].clone()


def in_order_of_memory(value: Tensor, param: Tensor) -> Tensor:
    """The elements of a tensor of the parameter's shape, in the order of the parameter's memory."""
    if value.stride() == param.stride():
        return value.as_strided((value.numel(),), (1,))
    dense = torch.empty_like(param, dtype=value.dtype)
    dense.copy_(value)
    return dense.as_strided((dense.numel(),), (1,))
