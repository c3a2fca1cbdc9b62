"""The iterator that copies batches to a device ahead of the script."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import NamedTuple

from ..resume.progress import EpochIterator, Position, Progress
from ..stats import BatchStage
from ..types import Loader
from .copies import Copier, Copy

__all__ = ["DeviceIterator"]


class _Ahead(NamedTuple):
    """A batch whose copy was started, or the error in its place."""

    copy: Copy | None
    error: Exception | None  # what stands in its place
    mark: Position  # the place after it


class DeviceIterator(BatchStage):
    """Delivers another iterator's batches, on a device.

    Errors come where they would without it; the other iterator is asked no further until then.

    Args:
        batches: an iterator over an epoch, of torch or ours.
        copier: to the device.
        ahead: how many batches stay on the device besides the one that is delivered.
    """

    stage = "device"

    def __init__(self, batches: EpochIterator, copier: Copier, ahead: int) -> None:
        self._batches: EpochIterator = batches
        self._copier = copier
        self._ahead = ahead
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._begin()

    def _begin(self) -> None:
        self._queue: deque[_Ahead] = deque()
        self._ended = False
        self.progress: Progress = self._batches.progress.twin()

    @property
    def _pin_memory(self) -> bool:
        """True if batches are delivered page-locked: what makes others of them does likewise."""
        return self._copier.streams.device.type == "cpu" and self._batches._pin_memory

    @property
    def _pin_memory_device(self) -> str | None:
        return self._batches._pin_memory_device

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        """Starts the next epoch; a DataLoader with persistent workers calls it."""
        with self._lock:
            self._batches._reset(loader, first_iter)
            self._begin()

    def _next(self) -> object:
        if self._process != os.getpid():  # another thread may have held it at the fork
            self._process, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            self._copier.streams.current()  # raises where nothing can be copied
            while not self._ended and len(self._queue) <= self._ahead:
                if self._queue and self._queue[-1].error is not None:
                    break
                self._fetch()
            if not self._queue:
                self.progress.go_to(self._batches.progress.mark())
                self.progress.finished = True
                self._copier.forget_passed()
                raise StopIteration
            entry = self._queue.popleft()
            self.progress.go_to(entry.mark)
            if entry.copy is not None:
                return self._copier.finish(entry.copy)
            error = entry.error
            assert error is not None
            try:
                raise error
            finally:
                del entry, error  # else the error would hold itself, and with it the iterator

    def _fetch(self) -> None:
        try:
            copy = self._copier.start(next(self._batches))
        except StopIteration:
            self._ended = True
        except Exception as error:
            self._queue.append(_Ahead(None, error, self._batches.progress.mark()))
        else:
            self._queue.append(_Ahead(copy, None, self._batches.progress.mark()))

    def __getstate__(self) -> object:
        raise NotImplementedError(f"{type(self).__name__} cannot be pickled")
