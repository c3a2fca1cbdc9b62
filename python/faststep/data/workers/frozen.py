"""Large static lists and dicts of a dataset, in memory that its workers share."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, overload
from zlib import crc32

from .frozen_memory import WORD, FrozenItems, FrozenMemory, Writer, reader_of


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
    if type(obj) not in (list, tuple, dict):
        raise TypeError(f"freeze() takes a list, tuple or dict, not {type(obj).__name__}")
    writer = Writer()
    try:
        spec = _write(writer, obj, "obj")
        memory = writer.finish()
    except BaseException:
        writer.close()
        raise
    kind, *stored = spec
    return FrozenDict(memory, *stored) if kind is dict else FrozenList(memory, stored[0], kind)


def _write(writer: Writer, obj: Any, name: str) -> tuple[Any, ...]:
    """Writes a list, tuple or dict; returns its type and what was written."""
    if type(obj) is not dict:
        return type(obj), writer.write_items(obj, name)
    kinds = set(map(type, obj))
    if not kinds <= {str} and not kinds <= {bytes} and not kinds <= {int}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(f"the keys of {name} must all be str, bytes or int to be frozen: {names}")
    keys = writer.write_items(list(obj), f"the keys of {name}")
    places = _hash_table(obj)
    table = FrozenItems("int", len(places), writer.write(places))
    return dict, keys, table, writer.write_items(list(obj.values()), f"the values of {name}")


def _hash(key: Any) -> int:
    """The same in every process, unlike Python's own."""
    if isinstance(key, str):
        return crc32(key.encode("utf-8", "surrogatepass"))
    return crc32(key if isinstance(key, bytes) else str(int(key)).encode())


def _hash_table(keys: Any) -> array[int]:
    """Places of keys, by hash; -1 where there is none. At least a third is free."""
    size = 1 << (len(keys) * 3 // 2).bit_length()
    table = array("q", [-1]) * size
    for place, key in enumerate(keys):
        at = _hash(key) % size
        while table[at] >= 0:
            at = (at + 1) % size
        table[at] = place
    return table


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
        self._item = reader_of(memory, stored)

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
    """A dict in frozen memory, in the order of its keys; equal to one with the same items."""

    def __init__(
        self, memory: FrozenMemory, keys: FrozenItems, table: FrozenItems, values: FrozenItems
    ) -> None:
        self._spec = memory, keys, table, values
        self._key = reader_of(memory, keys)
        self._value = reader_of(memory, values)
        self._table = memory.content[table.data : table.data + table.length * WORD].cast("q")

    def __len__(self) -> int:
        return self._spec[1].length

    def __getitem__(self, key: object) -> Any:
        place = self._place(key)
        if place < 0:
            raise KeyError(key)
        return self._value(place)

    def _place(self, key: object) -> int:
        """Where the key is; -1 if it is not there."""
        hash(key)  # unhashable ones are errors, as in a dict
        if not isinstance(key, (str, bytes, int)):
            if not isinstance(key, Integral) and not (isinstance(key, float) and key.is_integer()):
                return -1
            key = int(key)  # NumPy's integers, too, equal an int and have its hash
        size = len(self._table)
        at = _hash(key) % size
        while (place := self._table[at]) >= 0:
            if self._key(place) == key:
                return place
            at = (at + 1) % size
        return -1

    def __contains__(self, key: object) -> bool:
        return self._place(key) >= 0

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
