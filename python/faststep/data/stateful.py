"""Samplers, datasets and their iterators that keep a state of their own, as torchdata asks for it.

Whatever has the methods state_dict and load_state_dict does. An object may also be its own
iterator: then its state is the iterator's, and loaded after `iter`, which may reset it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import islice, repeat
from typing import Any

from .draws import repeating

__all__ = ["begin", "is_stateful", "items_of", "load_map", "snapshot", "states_of"]


def is_stateful(obj: Any) -> bool:
    """Whether an object can be asked for its state."""
    return all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict"))


def items_of(iterator: Any) -> Iterator[Any]:
    """What an iterator gives; to begin with these does not call its `__iter__`, which may reset."""
    return map(next, repeat(iterator))


def states_of(obj: Any, iterator: Any, ended: bool) -> dict[str, Any]:
    """The states of an object and its iterator; None for none.

    Args:
        iterator: None if there is none yet.
        ended: whether the iterator came to its end.
    """
    itself = obj is iterator or (iterator is None and hasattr(type(obj), "__next__"))
    of_iterator = iterator is not None and is_stateful(iterator)
    return {
        "object": obj.state_dict() if is_stateful(obj) and not itself else None,
        "iterator": iterator.state_dict() if of_iterator else None,
        "ended": ended,
    }


def snapshot(states: dict[str, Any], what: Any) -> bytes:
    """The states of `what`, pickled: what they hold may change with the next sample.

    Raises:
        TypeError: they cannot be pickled.
    """
    try:
        return pickle.dumps(states, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"the state_dict of a {type(what).__name__} cannot be pickled: {error}"
        ) from error


def begin(obj: Any, states: dict[str, Any] | None) -> Any | None:
    """An iterator of `obj` that goes on where it had the states; None if it had ended.

    Raises:
        ValueError: there is a state that nobody takes.
    """
    if states is None:
        return iter(obj)
    _load(obj, states["object"])
    if states["ended"] and states["object"] is not None:
        # `obj` may take it for the begin of its next epoch, or for a place after the last item,
        # and then the next `iter` would have none. Another one has none now.
        with repeating({}, None):
            reads_on = [*islice(items_of(iter(obj)), 1)]
        if reads_on:
            _load(obj, states["object"])
        return None
    iterator = iter(obj)
    _load(iterator, states["iterator"])
    return None if states["ended"] else iterator


def load_map(dataset: Any, record: dict[str, Any]) -> None:
    """Loads what a worker's record has of a map-style dataset."""
    _load(dataset, (record.get("states") or {}).get("object"))


def _load(obj: Any, state: Any) -> None:
    """Loads a state; None is none.

    Raises:
        ValueError: `obj` takes no state.
    """
    if state is None:
        return
    if not is_stateful(obj):
        raise ValueError(
            f"the loaded state has one for a {type(obj).__name__}, which has no load_state_dict"
        )
    obj.load_state_dict(state)
