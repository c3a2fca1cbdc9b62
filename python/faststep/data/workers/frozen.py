"""Large static lists and dicts of a dataset, in memory that its workers share."""

from __future__ import annotations

import mmap
import os
import pickle
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, overload

WORD = 8  # bytes


def freeze(obj: object) -> FrozenList | FrozenDict:
    """A read-only copy of a list, tuple or dict, in one piece of memory that processes share.

    A worker process that reads Python objects writes their reference counts, and so gets a copy of
    the memory they lie in. This has no objects: an item is made when it is asked for. Forked
    workers see the same memory, and those that are started otherwise get a handle to it.

    Args:
        obj: a list or tuple, or a dict with keys that all are str, bytes or int. Items and values
            that all are str, bytes, int or float take little space and time; anything else is
            pickled one by one, so that changing an item that was read changes nothing. Freeze the
            columns of a table one by one: a list inside `obj` is unpickled at each access.

    Returns:
        A Sequence (indices, slices, iteration, len, ==, in) or a Mapping.

    Raises:
        TypeError: `obj`, a key or an item is of a type that cannot be frozen; says where.
        OSError: there is no memory.
    """
    kind, content = type(obj), bytearray()
    if not isinstance(obj, (list, tuple, dict)) or kind not in (list, tuple, dict):
        raise TypeError(f"freeze() takes a list, tuple or dict, not {kind.__name__}")
    if not isinstance(obj, dict):
        stored = _write_items(content, obj, "obj")
        return FrozenList(FrozenMemory.of_bytes(content), stored, kind)
    kinds = set(map(type, obj))
    if not kinds <= {str} and not kinds <= {bytes} and not kinds <= {int}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(f"the keys of obj must all be str, bytes or int to be frozen: {names}")
    keys = [*obj]
    ranked = array("q", sorted(range(len(keys)), key=keys.__getitem__))
    parts = (
        _write_items(content, keys, "the keys of obj"),
        _write_items(content, ranked, "obj"),
        _write_items(content, [*obj.values()], "the values of obj"),
    )
    return FrozenDict(FrozenMemory.of_bytes(content), *parts)


class FrozenMemory:
    """The mapped content of an anonymous file.

    A forked worker has it, one that is started otherwise gets the file, any other copy its bytes.
    """

    def __init__(self, file: int) -> None:
        self.content = memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ))
        self._file = file  # its own from here on: where mapping it fails the caller closes it

    @classmethod
    def of_worker(cls, file: Any) -> FrozenMemory:
        return cls(file.detach())

    @classmethod
    def of_bytes(cls, content: bytes | bytearray) -> FrozenMemory:
        file = os.memfd_create("faststep-frozen")
        try:
            with open(file, "wb", closefd=False) as out:
                out.write(content or b"\0")  # what is empty cannot be mapped
            return cls(file)
        except BaseException:
            os.close(file)
            raise

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if get_spawning_popen() is not None:
            return FrozenMemory.of_worker, (DupFd(self._file),)
        return FrozenMemory.of_bytes, (bytes(self.content),)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)  # the mapping stays as long as views of it


class FrozenItems(NamedTuple):
    """Where the items of a list are in frozen memory.

    Args:
        kind: "q" or "d" for numbers, as in `array`; "str", "bytes" or "object".
        length: items.
        data: where they begin.
        ends: for items of different sizes, where it is said where each one ends.
        prefix, suffix: what all texts begin with, and end with, which is not in the memory.
    """

    kind: str
    length: int
    data: int
    ends: int = 0
    prefix: bytes = b""
    suffix: bytes = b""


def _write_items(content: bytearray, items: Sequence[Any], name: str) -> FrozenItems:
    """Appends the items to the content of new memory.

    Raises:
        TypeError: an item cannot be pickled; says which.
    """
    kinds, length, data = set(map(type, items)), len(items), len(content)
    kind = kinds.pop() if len(kinds) == 1 else object
    is_int = kind is int and all(-(1 << 63) <= item < 1 << 63 for item in items)
    if is_int or kind is float:
        code = "q" if is_int else "d"
        content += memoryview(array(code, items)).cast("B")
        return FrozenItems(code, length, data)
    prefix = suffix = b""
    if kind in (str, bytes):
        items, prefix, suffix = _without_shared_ends(items)
        encoded = [*map(_encoded, items)]
    else:
        kind, encoded = object, [_pickled(item, name, i) for i, item in enumerate(items)]
    content += b"".join(encoded)
    ends = len(content)
    content += memoryview(array("q", accumulate(map(len, encoded)))).cast("B")
    return FrozenItems(kind.__name__, length, data, ends, prefix, suffix)


def _without_shared_ends(texts: Sequence[Any]) -> tuple[list[Any], bytes, bytes]:
    """Some str or bytes without what all have in common, as paths have a root and an ending."""
    prefix = _common_beginning(texts)
    rest = [text[len(prefix) :] for text in texts]
    suffix = _common_beginning([text[::-1] for text in rest])[::-1]
    return [t[: len(t) - len(suffix)] for t in rest], _encoded(prefix), _encoded(suffix)


def _common_beginning(texts: Sequence[Any]) -> Any:
    first, last = min(texts), max(texts)
    both = enumerate(zip(first, last, strict=False))
    return first[: next((i for i, (a, b) in both if a != b), len(first))]


def _encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _pickled(item: object, name: str, index: int) -> bytes:
    try:
        return pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(f"{name}[{index}] cannot be frozen: {error}") from error


def _reader_of(memory: FrozenMemory, stored: FrozenItems) -> Callable[[int], Any]:
    """A function that returns the item at a place of a stored list."""
    content, size = memory.content, stored.length * WORD
    if stored.kind in ("q", "d"):
        return content[stored.data : stored.data + size].cast(stored.kind).__getitem__  # type: ignore[call-overload, no-any-return]
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


class _Frozen:
    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self


class FrozenList(_Frozen, Sequence[Any]):
    """A list or tuple in frozen memory; equal to one with the same items. A slice shares it."""

    def __init__(
        self, memory: FrozenMemory, stored: FrozenItems, kind: type, places: range | None = None
    ) -> None:
        self._spec = memory, stored, kind
        self._places = range(stored.length) if places is None else places
        self._item = _reader_of(memory, stored)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> FrozenList: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return FrozenList(*self._spec, self._places[index])
        try:
            place = self._places[index]
        except IndexError:
            raise IndexError(f"index {index} is out of range for {len(self)} items") from None
        return self._item(place)

    def __iter__(self) -> Iterator[Any]:
        return map(self._item, self._places)

    def __eq__(self, other: object) -> bool:
        kind = self._spec[2]
        if isinstance(other, FrozenList):
            if other._spec[2] is not kind:
                return NotImplemented
        elif not isinstance(other, kind):
            return NotImplemented
        same = isinstance(other, Sequence) and len(self) == len(other)
        return same and all(a == b for a, b in zip(self, other, strict=True))  # type: ignore[call-overload]

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return FrozenList, (*self._spec, self._places)

    def __repr__(self) -> str:
        first = ", ".join(map(repr, self[:3]))
        return f"<frozen {self._spec[2].__name__} of {len(self)} items: {first}, ...>"


class FrozenDict(_Frozen, Mapping[Any, Any]):
    """A dict in frozen memory, in the order of its keys; equal to one with the same items.

    Args:
        keys, values: in the order of the dict.
        ranked: the places of the keys from the lowest to the highest.
    """

    def __init__(
        self, memory: FrozenMemory, keys: FrozenItems, ranked: FrozenItems, values: FrozenItems
    ) -> None:
        self._spec = memory, keys, ranked, values
        self._key, self._ranked, self._value = (_reader_of(memory, s) for s in self._spec[1:])

    def __len__(self) -> int:
        return self._spec[1].length

    def __getitem__(self, key: object) -> Any:
        hash(key)  # unhashable ones are errors, as in a dict
        try:
            rank = bisect_left(range(len(self)), key, key=lambda i: self._key(self._ranked(i)))  # type: ignore[call-overload]
        except TypeError:  # it has no place among the keys
            raise KeyError(key) from None
        if rank == len(self) or self._key(place := self._ranked(rank)) != key:
            raise KeyError(key)
        return self._value(place)

    def __iter__(self) -> Iterator[Any]:
        return map(self._key, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (dict, FrozenDict)):
            return NotImplemented
        missing = object()
        return len(self) == len(other) and all(
            self._value(place) == other.get(self._key(place), missing) for place in range(len(self))
        )

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return FrozenDict, self._spec

    def __repr__(self) -> str:
        return f"<frozen dict of {len(self)} items>"
