"""Datasets over files that every process opens for itself."""

from __future__ import annotations

import bisect
import os
import resource
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch.utils.data import Dataset

from ..types import Handle, State, Transform
from .common import FormatError, PathLike, check_unchanged, file_mark, open_regular, position
from .shards import shard_names

MOST_OPEN = 64  # datasets of a process with an open file that may be dropped
FILES_OF_A_THREAD = 16
_opened: deque[weakref.ref[FileDataset]] = deque()
_living: weakref.WeakSet[FileDataset] = weakref.WeakSet()
# A forked child neither uses nor closes what its parent opened: libraries keep locks there.
_left_behind: list[object] = []


def _drop_old(newest: FileDataset) -> None:
    """Let go of what was opened first, beyond MOST_OPEN; a thread that reads it ends that first.

    A forked child has descriptors of its parent's files too: each takes a quarter of the limit.
    """
    _opened.append(weakref.ref(newest))
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    while len(_opened) > min(MOST_OPEN, descriptors // 4):
        dataset = _opened.popleft()()
        if dataset is not None and dataset is not newest:
            dataset.close()


def located(ends: Sequence[int], place: int) -> tuple[int, int]:
    """The number of a part, by the ends of all, and the place within it."""
    number = bisect.bisect_right(ends, place)
    return number, place - (ends[number - 1] if number else 0)


def one_of_few(files: OrderedDict[int, Any], number: int, opened: Callable[[int], Any]) -> Any:
    """The open file with this number; before a new one, those used longest ago are closed.

    Args:
        files: those that a thread has open, by number; at most FILES_OF_A_THREAD.
        number: of the file.
        opened: opens it.
    """
    if number not in files:
        while len(files) >= FILES_OF_A_THREAD:
            files.popitem(last=False)[1].close()
        files[number] = opened(number)
    files.move_to_end(number)
    return files[number]


class FileDataset(Dataset[Any]):
    """Samples in a file that is opened on first use, in each process for itself.

    A forked worker opens the file anew, and a pickled dataset holds its path only. `close()` closes
    it, as does the end of the dataset or of the program, and that of a thread for what it alone
    has open; the next use opens it again.

    Subclasses define `_open_handle`, whose result closes when nothing refers to it, and set
    `per_thread` where the library does not let threads share what it opens.
    """

    per_thread = False
    is_scarce = False  # whether a process may have only few open at a time

    def __init__(self, path: PathLike) -> None:
        self.path = os.fspath(path)
        self._prepare()

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self.close()
        _living.add(self)

    def _open_handle(self) -> object:
        raise NotImplementedError

    def _handle(self) -> Handle:
        own = self._own
        handle = getattr(own, "handle", None)
        if handle is None:
            with self._lock:
                handle = getattr(own, "handle", None)
                if handle is None:
                    handle = own.handle = self._open_handle()
                    if self.is_scarce:
                        _drop_old(self)
        return handle

    def close(self) -> None:
        """Closes the file in this process, once nobody reads it. The next use opens it again."""
        self._own: Any = threading.local() if self.per_thread else SimpleNamespace()

    def __enter__(self) -> object:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> State:
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_own")}

    def __setstate__(self, state: State) -> None:
        vars(self).update(state)
        self._prepare()


class IndexedDataset(FileDataset):
    """A FileDataset that reads several samples at once.

    Args:
        path: the file.
        transform: called on each sample.

    Subclasses define `_read`, and `__len__` or `_ends`: the number of samples up to the end of each
    part of the file.
    """

    _ends: list[int]

    def __init__(self, path: PathLike, transform: Transform | None) -> None:
        super().__init__(path)
        self.transform = transform

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _read(self, places: Sequence[int]) -> list[object]:
        """The samples at these places, counted from 0, before their transform."""
        raise NotImplementedError

    def _samples(self, indices: Sequence[int]) -> list[object]:
        places = [position(int(index), len(self), self.path) for index in indices]
        samples = self._read(places)
        return samples if self.transform is None else [*map(self.transform, samples)]

    def __getitem__(self, index: int) -> Any:
        return self._samples([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch, as torch's loader asks for them."""
        if type(self).__getitem__ is not IndexedDataset.__getitem__:
            return [self[index] for index in indices]  # a subclass has its own samples
        return self._samples(indices)


class RangeDataset(IndexedDataset):
    """Samples of files that are opened on first use; each thread has a few open at a time.

    Args:
        paths: as for `shard_names`.
        transform: called on each sample.

    Subclasses make an index of the files, which must not change from then on: `_ends`, the number
    of samples up to the end of each file.

    Raises:
        FormatError: when a sample is read, that its file has changed.
    """

    per_thread = True

    def __init__(
        self, paths: PathLike | Sequence[PathLike], transform: Transform | None = None
    ) -> None:
        self.paths = shard_names(paths)
        self._marks = [file_mark(path) for path in self.paths]
        self._ends: list[int] = []
        super().__init__(", ".join(self.paths[:3]), transform)

    def _open_handle(self) -> object:
        return OrderedDict()

    def _bytes(self, number: int, start: int, length: int) -> bytes:
        """A range of the file with this number."""
        path = self.paths[number]
        file = one_of_few(self._handle(), number, lambda number: open_regular(self.paths[number]))
        data = os.pread(file.fileno(), length, start)
        check_unchanged(path, self._marks[number], file_mark(file.fileno()))
        if len(data) != length:
            raise FormatError(f"{path}: the file ends in the {length} bytes from {start} on")
        return data


def _after_fork() -> None:
    for dataset in list(_living):
        _left_behind.append(dataset._own)
        dataset._prepare()


os.register_at_fork(after_in_child=_after_fork)
