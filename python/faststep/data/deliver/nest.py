"""Nested batches: a function applied to every leaf, in containers of the same types."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch

__all__ = ["convert"]


def convert(data: object, change: Callable[[object], object]) -> object:
    """`data` with `change` of each leaf, in containers as torch's pin_memory makes them.

    Leaves are tensors and objects with a method `to`; one that also has `pin_memory` is a leaf even
    if it is a container, as torch lets such an object pin itself. Anything else stays as it is.
    """
    if isinstance(data, torch.Tensor) or (hasattr(data, "pin_memory") and hasattr(data, "to")):
        return change(data)
    if isinstance(data, (str, bytes)):
        return data
    if isinstance(data, Mapping):
        return _mapping(data, {key: convert(value, change) for key, value in data.items()})
    if isinstance(data, (tuple, Sequence)):
        return _sequence(data, [convert(item, change) for item in data])
    return change(data) if hasattr(data, "to") else data


def _mapping(data: Any, items: dict[object, object]) -> object:
    """A mapping like `data`: a copy where that can be, as one may have more than its items."""
    try:
        if isinstance(data, MutableMapping):
            clone: Any = copy.copy(data)
            clone.update(items)
            return clone
        return type(data)(items)
    except TypeError:  # made or filled in another way
        return items


def _sequence(data: Any, items: list[Any]) -> object:
    if isinstance(data, tuple):
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    try:
        if isinstance(data, MutableSequence):
            clone: Any = copy.copy(data)
            for i, item in enumerate(items):
                clone[i] = item
            return clone
        return type(data)(items)
    except TypeError:  # a range, for one
        return items
