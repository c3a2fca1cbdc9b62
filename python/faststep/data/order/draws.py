"""The random states with which a sampler or dataset begins an epoch, to begin it again."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..types import State


def generator_of(*objects: Any) -> torch.Generator | None:
    """The first generator that one of the objects has for itself."""
    for obj in objects:
        generator = getattr(obj, "generator", None)
        if isinstance(generator, torch.Generator) and generator is not torch.default_generator:
            return generator
    return None


@contextlib.contextmanager
def noting(into: State, own: torch.Generator | None) -> Iterator[None]:
    """Notes the states, as they are now, of the generators that are drawn from meanwhile.

    Args:
        into: gets them by name, as what torch.load takes with weights_only.
        own: a generator besides the global ones of torch, Python and numpy.
    """
    before = _states(own)
    yield
    for name, state in _states(own).items():
        if name in before and not _equal(before[name], state):
            into[name] = _savable(before[name])


@contextlib.contextmanager
def repeating(noted: State, own: torch.Generator | None, put_back: bool = True) -> Iterator[None]:
    """Sets generators to what was noted.

    Args:
        own: a generator besides the global ones; it goes on from there.
        put_back: whether the global ones are afterwards as they were before.
    """
    before = _states(None)
    for name, state in noted.items():
        _set(name, _usable(state), own)
    try:
        yield
    finally:
        for name, state in before.items() if put_back else ():
            _set(name, state, None)


def _states(own: torch.Generator | None) -> State:
    states: State = {
        "torch": torch.default_generator.get_state(),
        "python": random.getstate(),
    }
    if "numpy.random" in sys.modules:
        from numpy import random as of_numpy  # waits for a thread that is importing it just now

        state: Any = of_numpy.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":  # a script may have set another one
            words = state["state"]
            gauss = state["has_gauss"], state["gauss"]
            states["numpy"] = "MT19937", words["key"], words["pos"], *gauss
    if own is not None:
        states["own"] = own.get_state()
    return states


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if hasattr(a[1], "tolist"):  # numpy's: its words are an array
        return a[2:] == b[2:] and bool((a[1] == b[1]).all())
    return bool(a == b)


def _savable(state: Any) -> object:
    if isinstance(state, torch.Tensor):
        return state
    words = torch.tensor(list(map(int, state[1])), dtype=torch.int64, device="cpu")
    return [state[0], words, *state[2:]]


def _usable(state: Any) -> object:
    if isinstance(state, torch.Tensor):
        return state
    return (state[0], tuple(state[1].tolist()), *state[2:])


def _set(name: str, state: Any, own: torch.Generator | None) -> None:
    if name == "torch":
        torch.default_generator.set_state(state)
    elif name == "python":
        random.setstate(state)
    elif name == "numpy":
        import numpy

        numpy.random.set_state(state)
    elif own is not None:
        own.set_state(state)
