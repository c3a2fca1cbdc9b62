"""Samplers, datasets and their iterators that keep a state of their own, as torchdata asks for it.

An object keeps a state if it has the methods state_dict and load_state_dict. An object may be its
own iterator. Its state is then loaded after `iter`, which may reset it.
"""

from __future__ import annotations

import inspect
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from typing import Any

import torch

from ..types import State
from .draws import generator_of, repeating

CHEAP = 200_000  # ns of a state that is taken each time
SHARE = 20  # of the time, one part may go to states

_answers_alone: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def is_stateful(obj: Any) -> bool:
    """True if an object can be asked for its state, without arguments; no module counts."""
    if isinstance(obj, torch.nn.Module):
        return False
    if not all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    answers = _answers_alone.get(type(obj))
    if answers is None:
        try:
            inspect.signature(obj.state_dict).bind()
            answers = True
        except TypeError:
            answers = False
        except ValueError:  # the signature of a builtin may be unknown
            answers = True
        _answers_alone[type(obj)] = answers
    return answers


class Pace:
    """Decides how often a state is taken in case that somebody asks for it.

    Args:
        every: once in so many times, with 0 never; None: each time, but for states that would take
            more than a twentieth of the time.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._count = 0
        self._cost = self._last = 0

    def is_due(self) -> bool:
        """True if it is time; counts."""
        self._count += 1
        if self._every is not None:
            return self._every > 0 and self._count % self._every == 0
        waits = self._cost > CHEAP
        return not waits or time.perf_counter_ns() - self._last >= (SHARE - 1) * self._cost

    def take(self, states: Callable[[], State]) -> bytes:
        """A snapshot, on time."""
        start = time.perf_counter_ns()
        try:
            return snapshot(states)
        finally:
            self._last = time.perf_counter_ns()
            self._cost = self._last - start


def items_of(iterator: Any) -> Iterator[object]:
    """Go through an iterator without a call of its `__iter__`, which may reset it."""
    return map(next, repeat(iterator))


def states_of(obj: Any, iterator: Any, ended: bool | None) -> State:
    """The states of an object and its iterator; None for none.

    Args:
        iterator: None if there is none yet.
        ended: whether the iterator came to its end; None if it has not begun.
    """
    itself = obj is iterator or (iterator is None and hasattr(type(obj), "__next__"))
    of_iterator = iterator is not None and is_stateful(iterator)
    return {
        "object": obj.state_dict() if is_stateful(obj) and not itself else None,
        "iterator": iterator.state_dict() if of_iterator else None,
        "ended": ended,
    }


def snapshot(states: Callable[[], State]) -> bytes:
    """States as they are now, pickled: what they hold may change with the next sample.

    That they cannot be taken is no error before somebody wants them.
    """
    try:
        return pickle.dumps(states(), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return pickle.dumps(f"{type(error).__name__}: {error}")


def opened(packed: bytes) -> State:
    """Unpack the states that `snapshot` took.

    Raises:
        RuntimeError: it could not take it.
    """
    states = pickle.loads(packed)
    if isinstance(states, str):
        raise RuntimeError(f"the state_dict of a dataset or sampler cannot be kept: {states}")
    kept: State = states
    return kept


def begin(obj: Any, states: State | None) -> Any | None:
    """An iterator of `obj` that goes on where it had the states; None if it had ended.

    Raises:
        ValueError: there is a state that nobody takes.
    """
    if states is None:
        return iter(obj)
    _load(obj, states["object"])
    if states["ended"] is not False and states["object"] is not None:
        # `obj` may take it for the begin of its next epoch, or for a place after the last item,
        # and then the next `iter` would have none. Another one has none now.
        own = generator_of(obj)
        of_own = None if own is None else own.get_state()
        with repeating({}, None):
            reads_on = [*islice(items_of(iter(obj)), 1)]
        if own is not None and of_own is not None:
            own.set_state(of_own)
        if reads_on:
            _load(obj, states["object"])
        return None if states["ended"] else iter(obj)
    iterator = iter(obj)
    _load(iterator, states["iterator"])
    return None if states["ended"] else iterator


def load_map(dataset: object, saved: State) -> None:
    """Loads what a saved worker has of a map-style dataset."""
    _load(dataset, (saved.get("states") or {}).get("object"))


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
