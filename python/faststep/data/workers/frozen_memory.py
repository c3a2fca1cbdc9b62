"""Read-only memory that processes share, and how objects are written to it."""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

WORD = 8  # bytes
AT_ONCE = 1 << 14  # items encoded before they are written


class FrozenItems(NamedTuple):
    """Where the items of a list are in frozen memory."""

    kind: str
    length: int
    data: int = 0  # where the items begin
    ends: int = 0  # for items of different sizes, where it is said where each one ends
    prefix: bytes = b""  # what all items begin with, and end with, which is not in the memory
    suffix: bytes = b""


class FrozenMemory:
    """The mapped content of an anonymous file.

    A forked worker has it, one that is started otherwise gets the file, any other copy its bytes.
    """

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, os.fstat(file).st_size or 1, prot=mmap.PROT_READ)
        self.content = memoryview(self._map)
        self._file = file  # its own from here on: where mapping it fails the caller closes it

    @classmethod
    def of_worker(cls, file: Any) -> FrozenMemory:
        return cls(file.detach())

    @classmethod
    def of_bytes(cls, content: bytes) -> FrozenMemory:
        writer = Writer()
        try:
            writer.write(content)
            return writer.finish()
        except BaseException:
            writer.close()
            raise

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if get_spawning_popen() is not None:
            return FrozenMemory.of_worker, (DupFd(self._file),)
        return FrozenMemory.of_bytes, (bytes(self.content),)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)  # the mapping stays as long as views of it


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("faststep-frozen")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Writer:
    """Writes lists of items to new memory."""

    def __init__(self) -> None:
        self._file = _anonymous_file()
        self._end = 0

    def close(self) -> None:
        os.close(self._file)

    def finish(self) -> FrozenMemory:
        """Return the memory that was written; the writer is not used any more."""
        if not self._end:
            self.write(bytes(WORD))
        return FrozenMemory(self._file)

    def write(self, content: Any) -> int:
        """Where the bytes are now: at a whole word."""
        start = self._end
        self._append(memoryview(content).cast("B"))
        self._append(bytes(-self._end % WORD))
        return start

    def write_items(self, items: Any, name: str) -> FrozenItems:
        """Writes a list or tuple, or another sized iterable.

        Raises:
            TypeError: an item cannot be pickled; says which.
        """
        kinds = set(map(type, items))
        kind = kinds.pop() if len(kinds) == 1 else object
        if kind is int and all(-(1 << 63) <= item < 1 << 63 for item in items):
            return FrozenItems("int", len(items), self.write(array("q", items)))
        if kind is float:
            return FrozenItems("float", len(items), self.write(array("d", items)))
        if kind is str or kind is bytes:
            return self._of_texts(kind.__name__, items)
        return self._of_sizes("object", _pickled(items, name))

    def _of_texts(self, kind: str, items: Any) -> FrozenItems:
        """Of str or bytes: without what all have in common, as paths have a root and an ending."""
        prefix, suffix = _shared_ends(items)
        begin, end = len(prefix), -len(suffix) or None
        stored = self._of_sizes(kind, (_encoded(item[begin:end]) for item in items))
        return stored._replace(prefix=_encoded(prefix), suffix=_encoded(suffix))

    def _of_sizes(self, kind: str, encoded: Iterable[bytes]) -> FrozenItems:
        start = self._end
        ends = array("q")
        end = 0
        waiting: list[bytes] = []
        for item in encoded:
            end += len(item)
            ends.append(end)
            waiting.append(item)
            if len(waiting) == AT_ONCE:
                self._append(b"".join(waiting))
                waiting.clear()
        self._append(b"".join(waiting))
        self._append(bytes(-self._end % WORD))
        return FrozenItems(kind, len(ends), start, self.write(ends))

    def _append(self, content: bytes | memoryview) -> None:
        done = 0
        while done < len(content):
            done += os.write(self._file, memoryview(content)[done:])
        self._end += len(content)


def _encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _shared_ends(items: Any) -> tuple[Any, Any]:
    """The common beginning of some str or bytes, and the common end of the rest of them."""
    first, last = min(items), max(items)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    length = len(first) if length is None else length
    suffix = first[length:]
    for item in items:
        while not item.endswith(suffix, length):
            suffix = suffix[1:]
        if not suffix:
            break
    return first[:length], suffix


def _pickled(items: Any, name: str) -> Iterable[bytes]:
    for index, item in enumerate(items):
        try:
            yield pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise TypeError(f"{name}[{index}] cannot be frozen: {error}") from error


def reader_of(memory: FrozenMemory, stored: FrozenItems) -> Callable[[int], Any]:
    """A function that returns the item at a place of a stored list."""
    content = memory.content
    size = stored.length * WORD
    if stored.kind in ("int", "float"):
        numbers = content[stored.data : stored.data + size].cast(
            "q" if stored.kind == "int" else "d"
        )
        return numbers.__getitem__
    ends = content[stored.ends : stored.ends + size].cast("q")
    start, shared = stored.data, stored.prefix or stored.suffix

    def item_bytes(index: int) -> Any:
        item = content[start + (ends[index - 1] if index else 0) : start + ends[index]]
        return b"".join((stored.prefix, item, stored.suffix)) if shared else item

    if stored.kind == "str":
        return lambda index: str(item_bytes(index), "utf-8", "surrogatepass")
    if stored.kind == "bytes":
        return lambda index: bytes(item_bytes(index))
    return lambda index: pickle.loads(item_bytes(index))
