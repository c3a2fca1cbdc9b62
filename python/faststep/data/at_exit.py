"""Iterators with threads, which end before the interpreter does."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol


class Closes(Protocol):
    """Has threads, which `close` ends."""

    def close(self) -> None: ...


_living: weakref.WeakSet[Closes] = weakref.WeakSet()


def close_at_exit(iterator: Closes) -> None:
    """Closes an iterator when the interpreter ends, if it still lives then."""
    _living.add(iterator)


@atexit.register
def _close_all() -> None:
    for iterator in list(_living):
        iterator.close()
