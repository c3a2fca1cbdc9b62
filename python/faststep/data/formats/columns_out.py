"""The files of one field while `convert` writes them."""

from __future__ import annotations

import os
from array import array
from typing import Any, NamedTuple

import torch

from ..types import Handle
from .common import FormatError

HEADER = 256  # bytes before the items; the shape that goes there is known at the end only
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StoredValue(NamedTuple):
    """A value as it is stored.

    Args:
        kind: "number", "array", "text" or "bytes".
        items: numpy array; a number has one item.
        dtype: torch's name of a type that numpy does not have, which `items` hold as integers.
    """

    kind: str
    items: Any
    dtype: str | None = None

    @property
    def form(self) -> tuple[Any, ...]:
        return self.kind, self.dtype or self.items.dtype.name, tuple(self.items.shape[1:])


class FieldWriter:
    """Writes one field's values to a .npy file, and their places where they vary in length.

    Values of one shape, and those that vary in their first dimension, lie in a file in the same
    way: which of the two it is may show late.

    Args:
        folder: where.
        stem: the file's name without its suffix.
        name: of the field, for messages.
    """

    def __init__(self, folder: str, stem: str, name: str) -> None:
        self.name = name
        self._folder, self._stem = folder, stem
        self._file = open(os.path.join(folder, f"{stem}.npy"), "wb")  # noqa: SIM115
        self._file.write(bytes(HEADER))
        self._first: StoredValue | None = None
        self._ends: array[int] | None = None  # of all values, where they differ in length
        self._count = 0  # values
        self._rows = 0

    def add(self, value: object, where: str) -> None:
        """Adds the value of one sample: a tensor, array, number, str or bytes."""
        rows = as_rows(value, self.name, where)
        if self._first is None:
            self._begin(rows)
        elif rows.form != self._first.form:
            raise FormatError(
                f"{where}: {self.name} is {_text(rows)}, those before are {_text(self._first)}: "
                "only the first dimension may differ; image_size or a transform makes images alike"
            )
        self._note(len(rows.items), 1)
        self._write(rows.items)

    def add_block(self, values: object) -> None:
        """Adds those of many samples: a tensor or array with one in each row."""
        if isinstance(values, torch.Tensor):
            stored = as_rows(values, self.name, "")
        else:
            stored = StoredValue("array", values)
        items = stored.items
        if self._first is None:
            kind = "number" if items.ndim == 1 else "array"
            first = items[:1] if items.ndim == 1 else items[0]
            self._begin(StoredValue(kind, first, stored.dtype))
        self._note(1 if items.ndim == 1 else items.shape[1], len(items))
        self._write(items)

    def _begin(self, rows: StoredValue) -> None:
        self._first = rows
        if rows.kind in ("text", "bytes"):
            self._ends = array("q")

    def _note(self, length: int, count: int) -> None:
        assert self._first is not None
        usual = len(self._first.items)
        if self._ends is None and length != usual:
            self._ends = array("q", [usual * (i + 1) for i in range(self._count)])
        self._count += count
        if self._ends is not None:
            self._ends.extend(self._rows + length * (i + 1) for i in range(count))
        self._rows += length * count

    def _write(self, items: Any) -> None:
        if items.size:
            import numpy

            packed = numpy.ascontiguousarray(items).reshape(-1)
            self._file.write(packed.view(numpy.uint8).data)

    def finish(self) -> dict[str, Any]:
        """Completes the files and waits until the disk has them; returns the manifest's entry."""
        first = self._first
        assert first is not None
        inner = first.items.shape[1:]
        kind = first.kind if first.kind in ("text", "bytes") else "rows"
        shape = (self._count,) if first.kind == "number" else (self._count, *first.items.shape)
        if self._ends is not None:
            shape = (self._rows, *inner)
            kind = kind if kind != "rows" else "ragged"
        self._file.seek(0)
        self._file.write(_header(first.items.dtype.str, shape))
        self._sync_and_close(self._file)
        entry = {"name": self.name, "kind": kind, "file": f"{self._stem}.npy", "dtype": first.dtype}
        if self._ends is not None:
            entry["offsets"] = f"{self._stem}.offsets.npy"
            with open(os.path.join(self._folder, f"{self._stem}.offsets.npy"), "wb") as file:
                file.write(_header("<i8", (self._count + 1,)) + bytes(8))
                self._ends.tofile(file)
                self._sync_and_close(file)
        return entry

    @staticmethod
    def _sync_and_close(file: Handle) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()

    def close(self) -> None:
        """Closes the file; the rest of it is of no use then."""
        self._file.close()


def _text(rows: StoredValue) -> str:
    kind, dtype, inner = rows.form
    shape = ", ".join(map(str, ("*", *inner)))
    return kind if kind in ("text", "bytes") else f"{dtype} of the shape ({shape})"


def as_rows(value: object, name: str, where: str) -> StoredValue:
    """A value as it is stored."""
    import numpy

    if isinstance(value, str):
        return StoredValue("text", numpy.frombuffer(value.encode("utf-8"), numpy.uint8))
    if isinstance(value, (bytes, bytearray)):
        return StoredValue("bytes", numpy.frombuffer(value, numpy.uint8))
    dtype = None
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise FormatError(f"{where}: {name} is not a dense tensor")
        tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        try:
            value = tensor.numpy()
        except TypeError:
            dtype = str(tensor.dtype).removeprefix("torch.")
            value = tensor.view(INTEGERS[tensor.element_size()]).numpy()
    elif not isinstance(value, (bool, int, float, numpy.ndarray, numpy.generic)):
        raise FormatError(
            f"{where}: {name} is a {type(value).__name__}, and no tensor, array, number, str or "
            "bytes: make one of it with a transform first"
        )
    items = numpy.asarray(value)
    items = items.astype(items.dtype.newbyteorder("="), copy=False)
    try:
        torch.from_numpy(numpy.empty(0, items.dtype))
    except TypeError:
        raise FormatError(
            f"{where}: {name} has the type {items.dtype}, which torch does not have"
        ) from None
    return StoredValue(
        "array" if items.ndim else "number", items if items.ndim else items[None], dtype
    )


def _header(descr: str, shape: tuple[int, ...]) -> bytes:
    """The first HEADER bytes of a .npy file of version 1.0."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {tuple(map(int, shape))!r}, }}"
    room = HEADER - 10
    if len(text) >= room:
        raise FormatError(f"an array of {len(shape)} dimensions has no room in its header")
    size = room.to_bytes(2, "little")
    return b"\x93NUMPY\x01\x00" + size + text.ljust(room - 1).encode("latin-1") + b"\n"
