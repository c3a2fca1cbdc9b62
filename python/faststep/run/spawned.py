"""Lets processes that multiprocessing starts anew have the swaps too.

Such a process first unpickles what it needs to become a child: names and paths. An entry of ours
there swaps torch's classes, before the script's main module is imported.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import process, spawn
from typing import Any

# Whose processes run no training: workers of loaders, and servers of managers.
LEFT = ("torch.utils.data.", "faststep.data.", "multiprocessing.managers")


class _Begin:
    """Begins the swaps where it is unpickled, with the paths by which faststep is found."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from faststep.run import swap_silently; swap_silently({list(self._parts)!r})"
        )
        return exec, (code, {})


def swap_in_spawned(parts: Sequence[str], note: Callable[[], None]) -> None:
    """Let children be swapped.

    Args:
        parts: those of `run`.
        note: called for each such child.
    """
    starting = threading.local()
    start, prepared = process.BaseProcess.start, spawn.get_preparation_data

    @functools.wraps(start)
    def started(child: Any) -> None:
        starting.target = getattr(getattr(child, "_target", None), "__module__", None) or ""
        try:
            start(child)
        finally:
            starting.target = ""

    @functools.wraps(prepared)
    def preparation(name: str) -> dict[str, Any]:
        data = prepared(name)
        target = getattr(starting, "target", "")
        if name != "ignore" and not target.startswith(LEFT):
            data["faststep"] = _Begin(parts)
            note()
        return data

    setattr(process.BaseProcess, "start", started)  # noqa: B010
    setattr(spawn, "get_preparation_data", preparation)  # noqa: B010
