"""Arrow files and streams, by pyarrow; mapped where the columns have rows of one size."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence

from torch.utils.data import ConcatDataset, Dataset

from ..types import Array, Handle, Transform
from .common import FormatError, PathLike, check_unchanged, library, naming, open_regular
from .mapped import MappedArrays, map_array
from .tables import Form, GroupedDataset, chosen_columns, fixed_rows, form_of, is_fixed


def open_arrow(
    path: PathLike,
    *,
    columns: Sequence[str] | None = None,
    transform: Transform | None = None,
) -> Dataset[object]:
    """The rows of an Arrow IPC file or stream, as the `datasets` library writes them.

    An ArrayDataset, or a ConcatDataset of one for each record batch, if all columns are numbers or
    fixed-size lists of numbers without missing values and are not compressed; else an
    ArrowDataset, whose arguments and errors these are.
    """
    dataset = ArrowDataset(path, columns=columns, transform=transform)
    if transform is not None:
        return dataset
    with dataset:  # closed again: a process that forks has nothing open
        if not dataset.has_rows_of_one_size():
            return dataset
        parts = [_mapped(dataset, group) for group in range(len(dataset._ends))]
    arrays = [part for part in parts if part is not None]
    if not arrays or len(arrays) < len(parts):
        return dataset
    return arrays[0] if len(arrays) == 1 else ConcatDataset(arrays)


class ArrowDataset(GroupedDataset):
    """Rows of an Arrow IPC file or stream. Each thread of each process maps it for itself.

    Args:
        path: the file.
        columns: their names; None, the default, for all.
        transform: called on each sample.

    A sample is a dict: tensors for numbers and lists of numbers, str, bytes, and a dict for a
    struct. A stream with compression is decompressed into memory as a whole.

    Raises:
        FormatError: the file is damaged, or a column is not there or of a type without a place in a
            sample; when a sample is read, that a value is missing.
        ImportError: pyarrow is not installed.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
    ) -> None:
        name = os.fspath(path)
        batches = _opened(name)
        names = chosen_columns(batches.schema, columns, name)
        self._form = _form(batches, names, name)
        super().__init__(name, names, transform, self._form.group_lengths)

    def has_rows_of_one_size(self) -> bool:
        """True if all columns are numbers or fixed-size lists of numbers."""
        schema = self._handle()[0].schema
        return all(is_fixed(schema.field(name).type) for name in self.columns)

    def _open_handle(self) -> object:
        batches = _opened(self.path)
        columns = [name for name in self.columns if name in batches.schema.names]
        check_unchanged(self.path, self._form, _form(batches, columns, self.path))
        return batches, OrderedDict()

    def _read_group(self, handle: Handle, group: int) -> Handle:
        return handle.get(group).select(self.columns)

    def _group_name(self, group: int) -> str:
        return f"{self.path}: record batch {group}"


class _Batches:
    """The record batches of a mapped file or stream."""

    def __init__(self, path: str) -> None:
        arrow = library("pyarrow", "parquet")
        ipc = library("pyarrow.ipc", "parquet")
        import numpy

        self.buffer = arrow.py_buffer(map_array(path, numpy.uint8, (os.path.getsize(path),)))
        self._stream: list[object] | None = None
        if self.buffer.slice(0, 6).to_pybytes() == b"ARROW1":
            self._reader = ipc.open_file(self.buffer)
            self.count = self._reader.num_record_batches
        else:
            self._reader = ipc.open_stream(self.buffer)
            self._stream = [*self._reader]
            self.count = len(self._stream)
        self.schema = self._reader.schema

    def get(self, number: int) -> Handle:
        return self._reader.get_batch(number) if self._stream is None else self._stream[number]

    def holds(self, rows: Array) -> bool:
        """True if a numpy array lies in the file."""
        first = rows.ctypes.data - self.buffer.address
        return not rows.size or 0 <= first <= self.buffer.size - rows.nbytes


def _opened(path: str) -> _Batches:
    arrow = library("pyarrow", "parquet")
    open_regular(path).close()
    with naming(path, arrow.lib.ArrowException):
        return _Batches(path)


def _form(batches: _Batches, columns: Sequence[str], path: str) -> Form:
    with naming(path, library("pyarrow", "parquet").lib.ArrowException):
        lengths = [batches.get(i).num_rows for i in range(batches.count)]
    return form_of(batches.schema, columns, lengths)


def _mapped(dataset: ArrowDataset, group: int) -> MappedArrays | None:
    """The rows of a record batch in the file; None if they do not lie there as rows."""
    batches = dataset._handle()[0]
    arrow = library("pyarrow", "parquet")
    with naming(dataset._group_name(group), arrow.lib.ArrowException):
        batch = dataset._read_group(batches, group)
        batch.validate()
        arrays = {name: fixed_rows(batch.column(name)) for name in dataset.columns}
    if any(rows is None or not batches.holds(rows) for rows in arrays.values()):
        return None
    # all record batches are pickled with one dataset, which looks at the file once
    return MappedArrays(arrays, _again, dataset, group)


def _again(dataset: ArrowDataset, group: int) -> MappedArrays:
    found = _mapped(dataset, group)
    if found is None:
        raise FormatError(f"{dataset._group_name(group)} is not what it was")
    return found
