"""Datasets over files that every process opens for itself."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from torch.utils.data import Dataset

from .common import PathLike

__all__ = ["FileDataset"]

_living: weakref.WeakSet[FileDataset] = weakref.WeakSet()
# A forked child neither uses nor closes what its parent opened: libraries keep locks there.
_left_behind: list[dict[int, Any]] = []


def _close_all(handles: dict[int, Any], close: Any) -> None:
    while handles:
        close(handles.popitem()[1])


class FileDataset(Dataset[Any]):
    """Samples in a file that is opened on first use, in each process for itself.

    A forked worker opens the file anew, and a pickled dataset holds its path only. `close()` closes
    it, as does the end of the dataset or of the program; the next use opens it again.

    Subclasses define `_open_handle` and `_close_handle`, and set `per_thread` where the library
    does not let threads share what it opens.
    """

    per_thread = False

    def __init__(self, path: PathLike) -> None:
        self.path = os.fspath(path)
        self._prepare()
        _living.add(self)

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[int, Any] = {}
        self._end = weakref.finalize(self, _close_all, self._handles, self._close_handle)

    def _open_handle(self) -> Any:
        raise NotImplementedError

    @staticmethod
    def _close_handle(handle: Any) -> None:
        handle.close()

    def _handle(self) -> Any:
        key = threading.get_ident() if self.per_thread else 0
        handle = self._handles.get(key)
        if handle is None:
            with self._lock:
                handle = self._handles.get(key)
                if handle is None:
                    handle = self._handles[key] = self._open_handle()
        return handle

    def close(self) -> None:
        """Closes the file in this process. The next use opens it again."""
        with self._lock:
            _close_all(self._handles, self._close_handle)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_handles", "_end")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()
        _living.add(self)

    def _leave_behind(self) -> None:
        self._end.detach()
        _left_behind.append(self._handles)
        self._prepare()


def _after_fork() -> None:
    for dataset in list(_living):
        dataset._leave_behind()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
