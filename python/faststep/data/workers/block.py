"""A read-only block of memory that processes share, and how objects are written to one."""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, NamedTuple

__all__ = ["Block", "Column", "Writer"]

WORD = 8  # bytes
AT_ONCE = 1 << 14  # items encoded before they are written
PATHS = PosixPath, PurePosixPath, PureWindowsPath, WindowsPath  # are all that their text says


class Column(NamedTuple):
    """Where the items of a list are in a block."""

    kind: str
    length: int
    data: int = 0  # where the items begin
    ends: int = 0  # where the places at which each item ends are, for items of different sizes
    extra: Any = None  # the class of paths; the parts of "parts"


class Block:
    """The mapped content of an anonymous file.

    A forked worker has it, one that is started otherwise gets the file, any other copy its bytes.
    """

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, os.fstat(file).st_size or 1, prot=mmap.PROT_READ)
        self.view = memoryview(self._map)
        self._file = file  # its own from here on: where mapping it fails the caller closes it

    @classmethod
    def of_worker(cls, file: Any) -> Block:
        return cls(file.detach())

    @classmethod
    def of_bytes(cls, content: bytes) -> Block:
        writer = Writer()
        try:
            writer.write(content)
            return writer.block()
        except BaseException:
            writer.close()
            raise

    def __reduce__(self) -> Any:
        if get_spawning_popen() is not None:
            return Block.of_worker, (DupFd(self._file),)
        return Block.of_bytes, (bytes(self.view),)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)  # the mapping stays as long as views of it


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("faststep-frozen")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Writer:
    """Writes columns to a new block."""

    def __init__(self) -> None:
        self._file = _anonymous_file()
        self._end = 0

    def close(self) -> None:
        os.close(self._file)

    def block(self) -> Block:
        """What was written; the writer is not used any more."""
        if not self._end:
            self.write(bytes(WORD))
        return Block(self._file)

    def write(self, content: Any) -> int:
        """Where the bytes are now: at a whole word."""
        view = memoryview(content).cast("B")
        start, done = self._end, 0
        while done < len(view):
            done += os.write(self._file, view[done:])
        padding = -len(view) % WORD
        if padding:
            os.write(self._file, bytes(padding))
        self._end += len(view) + padding
        return start

    def column(self, items: Any, name: str) -> Column:
        """Writes a list or tuple, or another sized iterable.

        Raises:
            TypeError: an item cannot be pickled; says which.
        """
        kinds = set(map(type, items))
        kind = kinds.pop() if len(kinds) == 1 else object
        if kind is int and all(-(1 << 63) <= item < 1 << 63 for item in items):
            return Column("int", len(items), self.write(array("q", items)))
        if kind is float:
            return Column("float", len(items), self.write(array("d", items)))
        if kind is str:
            return self._of_sizes("str", map(_encoded, items))
        if kind is bytes:
            return self._of_sizes("bytes", items)
        if kind in PATHS:
            return self._of_sizes("path", (_encoded(str(item)) for item in items), kind)
        return self._of_sizes("object", _pickled(items, name))

    def _of_sizes(self, kind: str, encoded: Iterable[bytes], extra: Any = None) -> Column:
        start = self._end
        ends = array("q")
        end = start
        waiting: list[bytes] = []
        for item in encoded:
            end += len(item)
            ends.append(end)
            waiting.append(item)
            if len(waiting) == AT_ONCE:
                self._append(b"".join(waiting))
                waiting.clear()
        self._append(b"".join(waiting))
        self.write(bytes(-self._end % WORD))
        return Column(kind, len(ends), start, self.write(ends), extra)

    def _append(self, content: bytes) -> None:
        done = 0
        while done < len(content):
            done += os.write(self._file, memoryview(content)[done:])
        self._end += len(content)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _pickled(items: Any, name: str) -> Iterable[bytes]:
    for index, item in enumerate(items):
        try:
            yield pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise TypeError(f"{name}[{index}] cannot be frozen: {error}") from error


def reader_of(block: Block, column: Column) -> Callable[[int], Any]:
    """A function that returns the item at a place of a column."""
    view = block.view
    if column.kind in ("int", "float"):
        size = column.length * WORD
        numbers = view[column.data : column.data + size].cast("q" if column.kind == "int" else "d")
        return numbers.__getitem__
    ends = view[column.ends : column.ends + column.length * WORD].cast("q")
    start, kind = column.data, column.extra

    def item_bytes(index: int) -> memoryview:
        return view[ends[index - 1] if index else start : ends[index]]

    if column.kind == "str":
        return lambda index: str(item_bytes(index), "utf-8", "surrogatepass")
    if column.kind == "bytes":
        return lambda index: bytes(item_bytes(index))
    if column.kind == "path":
        return lambda index: kind(str(item_bytes(index), "utf-8", "surrogatepass"))
    return lambda index: pickle.loads(item_bytes(index))
