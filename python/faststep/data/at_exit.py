"""Iterators with threads, which end before the interpreter does."""

from __future__ import annotations

import atexit
import weakref
from typing import Any

_living: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(iterator: Any) -> None:
    """Ends the threads of an iterator when the interpreter ends, if it still lives then."""
    _living.add(iterator)


@atexit.register
def _close_all() -> None:
    for iterator in list(_living):
        iterator._shutdown_workers()
