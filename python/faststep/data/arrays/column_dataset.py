"""Datasets whose samples are rows of named columns."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from .columns import Column
from .structure import Structure

__all__ = ["ColumnDataset"]


class ColumnDataset(Dataset[Any]):
    """A dataset whose samples threads can gather; `__getitem__` gives the same ones.

    The names are private, so that those of a script's subclass do not meet them.
    """

    def _structure(self) -> tuple[Structure, list[str]]:
        """The containers of a sample, and the names of its parts."""
        raise NotImplementedError

    def _columns(self) -> list[tuple[Column, ...]]:
        """The columns of each part of the dataset, one after another: one column per leaf."""
        raise NotImplementedError

    @classmethod
    def _reads_rows_as(cls) -> type:
        """The class that has `_columns`: a script's subclass of it may read in another way."""
        return next(kind for kind in cls.__mro__ if "_columns" in vars(kind))
