"""A damaged or made-up state of the loader is an error, and not the end of the process."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

from faststep.data import DataLoader

from .resumable import ROWS, Shuffled


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(ROWS)), 4, sampler=Shuffled("numpy"))


def numpys(state: Any) -> list[Any]:
    """The state of numpy's generator in that of a loader."""
    if isinstance(state, dict):
        state = list(state.values())
    if not isinstance(state, (list, tuple)):
        return []
    if state and isinstance(state[0], str) and state[0] == "MT19937":
        return [state]
    return [found for part in state for found in numpys(part)]


def go_on(again: DataLoader[Any], state: Any) -> None:
    again.load_state_dict(state)
    next(iter(again))


@pytest.mark.parametrize("at", [-1, 625, 10**9, 2**70])
def test_the_place_of_numpys_generator(at: int) -> None:
    begun = loader()
    next(iter(begun))
    state = begun.state_dict()
    (drawn,) = numpys(state)
    assert 0 <= drawn[2] <= 624
    drawn[2] = at
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    again = loader()
    with pytest.raises(ValueError, match="expected random states"):
        go_on(again, state)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


def test_the_words_of_numpys_generator() -> None:
    begun = loader()
    next(iter(begun))
    state = begun.state_dict()
    (drawn,) = numpys(state)
    drawn[1:3] = torch.zeros(2000, dtype=torch.int64), 1000
    again = loader()
    with pytest.raises(ValueError, match="expected random states"):
        go_on(again, state)
