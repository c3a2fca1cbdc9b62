"""Records that are ranges of bytes in files, which are read and not mapped."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence

from ..types import Handle, Transform
from .common import FormatError, PathLike, check_unchanged, file_mark, open_regular
from .handles import RecordDataset, one_of_few
from .shards import shard_names

__all__ = ["RangeDataset"]


class RangeDataset(RecordDataset):
    """Records of files that are opened on first use; each thread has a few open at a time.

    Args:
        paths: as for `shard_names`.
        transform: called on each sample.

    Subclasses make an index of the files, which must not change from then on: `_ends`, the number
    of records up to the end of each file.

    Raises:
        FormatError: when a record is read, that its file has changed.
    """

    per_thread = True

    def __init__(
        self, paths: PathLike | Sequence[PathLike], transform: Transform | None = None
    ) -> None:
        self.paths = shard_names(paths)
        self._marks = [file_mark(path) for path in self.paths]
        self._ends: list[int] = []
        super().__init__(", ".join(self.paths[:3]), transform)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _open_handle(self) -> object:
        return OrderedDict()

    @staticmethod
    def _close_handle(handle: Handle) -> None:
        while handle:
            handle.popitem()[1].close()

    def _bytes(self, number: int, start: int, length: int) -> bytes:
        """A range of the file with this number."""
        path = self.paths[number]
        file = one_of_few(self._handle(), number, lambda number: open_regular(self.paths[number]))
        data = os.pread(file.fileno(), length, start)
        check_unchanged(path, self._marks[number], file_mark(file.fileno()))
        if len(data) != length:
            raise FormatError(f"{path}: the file ends in the {length} bytes from {start} on")
        return data
