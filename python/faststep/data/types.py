"""What the parts of a loader expect of each other."""

from __future__ import annotations

from typing import Protocol

__all__ = ["CountsEpochs"]


class CountsEpochs(Protocol):
    """Knows which epoch of a loader's iterator this is."""

    epoch: int
