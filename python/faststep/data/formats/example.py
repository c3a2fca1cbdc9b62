"""tf.train.Example and SequenceExample: the features of a message, without TensorFlow or protobuf.

The messages, by field numbers: Example {1: Features}, Features {1: map of str to Feature}, Feature
{1: BytesList, 2: FloatList, 3: Int64List}, each list {1: values}, packed or not. SequenceExample
{1: Features, 2: FeatureLists}, FeatureLists {1: map of str to FeatureList}, FeatureList
{1: Feature, once for each step}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
VALUE_KINDS = {1: "bytes", 2: "float", 3: "int64"}


def parse_example(data: bytes) -> dict[str, Any]:
    """The features of a serialized tf.train.Example or SequenceExample.

    Returns:
        By name: float32 or int64 tensors of one dimension, or bytes; a list of bytes where a
        feature has not exactly one. A feature list of a SequenceExample is a list with such a value
        for each step, under its name beside those of the context.

    Raises:
        ValueError: it is no such message; says at which byte. Or a feature list of a
            SequenceExample has the name of a feature of its context.
    """
    view = memoryview(data)
    features = _named(view, 1, _feature)
    lists = _named(view, 2, _feature_list)
    if both := sorted(features.keys() & lists.keys()):
        raise ValueError(f"{both} are names of the context's features and of feature lists")
    return dict(sorted((features | lists).items()))


Reader = Callable[[memoryview, int, int], Any]


def _named(view: memoryview, number: int, read: Reader) -> dict[str, object]:
    """The map in one field of the message, whose values `read` makes."""
    found: dict[str, object] = {}
    for start, end in _messages(view, 0, len(view), number):
        for entry_start, entry_end in _messages(view, start, end, 1):
            name, value = _entry(view, entry_start, entry_end, read)
            found[name] = value
    return found


def _varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise ValueError(f"no number ends at byte {at} of the message")


def _fields(view: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, wire type, start, end) of each field."""
    while at < end:
        key, at = _varint(view, at, end)
        wire, start = key & 7, at
        if wire == VARINT:
            _, at = _varint(view, at, end)
        elif wire == FIXED64:
            at += 8
        elif wire == FIXED32:
            at += 4
        elif wire == BYTES:
            size, start = _varint(view, at, end)
            at = start + size
        else:
            raise ValueError(f"no field begins at byte {start} of the message (wire type {wire})")
        if at > end:
            raise ValueError(f"the field at byte {start} of the message ends after it")
        yield key >> 3, wire, start, at


def _messages(view: memoryview, at: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    for number, wire, start, stop in _fields(view, at, end):
        if number == wanted:
            if wire != BYTES:
                raise ValueError(f"field {number} at byte {start} has wire type {wire}")
            yield start, stop


def _entry(view: memoryview, at: int, end: int, read: Reader) -> tuple[str, object]:
    name, value = "", None
    for number, wire, start, stop in _fields(view, at, end):
        if wire == BYTES and number == 1:
            name = str(view[start:stop], "utf-8")
        elif wire == BYTES and number == 2:
            value = read(view, start, stop)
    return name, [] if value is None else value


def _feature_list(view: memoryview, at: int, end: int) -> list[object]:
    return [_feature(view, start, stop) for start, stop in _messages(view, at, end, 1)]


def _feature(view: memoryview, at: int, end: int) -> object:
    found: object = []
    for number, wire, start, stop in _fields(view, at, end):
        if number in VALUE_KINDS and wire == BYTES:
            read = (_bytes_list, _float_list, _int64_list)[number - 1]
            found = read(view, start, stop)
    return found


def _bytes_list(view: memoryview, at: int, end: int) -> bytes | list[bytes]:
    values = [bytes(view[start:stop]) for start, stop in _messages(view, at, end, 1)]
    return values[0] if len(values) == 1 else values


def _float_list(view: memoryview, at: int, end: int) -> torch.Tensor:
    parts = bytearray()
    for number, wire, start, stop in _fields(view, at, end):
        if number == 1:
            if wire not in (BYTES, FIXED32) or (stop - start) % 4:
                raise ValueError(f"the floats at byte {start} of the message are not whole")
            parts += view[start:stop]
    return torch.frombuffer(parts, dtype=torch.float32) if parts else torch.empty(0)


def _int64_list(view: memoryview, at: int, end: int) -> torch.Tensor:
    parts = bytearray()
    for number, wire, start, stop in _fields(view, at, end):
        if number == 1:
            if wire not in (BYTES, VARINT):
                raise ValueError(f"the integers at byte {start} of the message are not varints")
            parts += view[start:stop]
    return _varints(parts)


def _varints(data: bytearray) -> torch.Tensor:
    """All numbers of a packed list at once."""
    import numpy

    if not data:
        return torch.empty(0, dtype=torch.int64)
    items = numpy.frombuffer(data, numpy.uint8)
    ends = numpy.flatnonzero(items < 128)
    if not len(ends) or ends[-1] != len(items) - 1:
        raise ValueError("the last of a list of integers has no end")
    starts = numpy.concatenate(([0], ends[:-1] + 1))
    places = numpy.arange(len(items)) - numpy.repeat(starts, ends - starts + 1)
    if places.max() > 9:
        raise ValueError("an integer of a list is longer than 10 bytes")
    shifted = (items & 127).astype(numpy.uint64) << (7 * places).astype(numpy.uint64)
    return torch.from_numpy(numpy.add.reduceat(shifted, starts).view(numpy.int64))
