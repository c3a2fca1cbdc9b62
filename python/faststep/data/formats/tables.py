"""Tables whose rows are stored in groups: Parquet's row groups, Arrow's record batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..types import Array, Handle, Transform
from .common import FormatError, library, naming
from .handles import IndexedDataset, located

CACHED_GROUPS = 2  # per thread; more would be a copy of the file


def chosen_columns(schema: Handle, columns: Sequence[str] | None, path: str) -> list[str]:
    """The columns to read, of types that have a place in a sample.

    Raises:
        FormatError: one is not there, or of another type.
    """
    names = list(schema.names) if columns is None else list(columns)
    for name in names:
        if schema.names.count(name) != 1:
            raise FormatError(f"{path}: there is not one column {name!r} among {schema.names}")
        if not _is_readable(schema.field(name).type):
            raise FormatError(
                f"{path}: column {name!r} has the type {schema.field(name).type}, which has no "
                "place in a sample: choose others with columns=[...]"
            )
    if not names:
        raise FormatError(f"{path}: there is no column in it")
    return names


class Form(NamedTuple):
    """The marks by which a file is known when it is opened again."""

    columns: list[tuple[str, str]]  # names and types
    group_lengths: list[int]


def form_of(schema: Handle, columns: Sequence[str], group_lengths: Sequence[int]) -> Form:
    """The form of a file with these groups."""
    return Form([(name, str(schema.field(name).type)) for name in columns], [*group_lengths])


def _is_number(kind: object) -> bool:
    types = library("pyarrow", "parquet").types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_list(kind: object) -> bool:
    types = library("pyarrow", "parquet").types
    return bool(types.is_list(kind) or types.is_large_list(kind))


def is_fixed(kind: Any) -> bool:
    """Numbers, and lists of a fixed length of these."""
    types = library("pyarrow", "parquet").types
    while types.is_fixed_size_list(kind):
        kind = kind.value_type
    return _is_number(kind)


def _is_readable(kind: Any) -> bool:
    types = library("pyarrow", "parquet").types
    if types.is_dictionary(kind):
        return _is_readable(kind.value_type)
    if types.is_struct(kind):
        return all(_is_readable(kind.field(i).type) for i in range(kind.num_fields))
    if _is_list(kind):
        return is_fixed(kind.value_type)
    return is_fixed(kind) or any(is_one(kind) for is_one in _strings())


def _strings() -> list[Callable[[object], bool]]:
    """Tests for the types of texts and bytes; older releases of pyarrow lack some."""
    types = library("pyarrow", "parquet").types
    names = [f"is_{size}{kind}" for size in ("", "large_") for kind in ("string", "binary")]
    names += ["is_fixed_size_binary", "is_string_view", "is_binary_view"]
    return [getattr(types, name) for name in names if hasattr(types, name)]


def fixed_rows(array: Array) -> Array:
    """The rows of a column of numbers or fixed lists as a numpy array, without a copy if possible.

    Returns None for other types, and where a value is missing.
    """
    if not is_fixed(array.type) or array.null_count:
        return None
    shape = [len(array)]
    while not _is_number(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
        if array.null_count:
            return None
    return array.to_numpy(zero_copy_only=False).reshape(shape)


class _Values:
    """The values of one column in one group."""

    def __init__(self, array: Array) -> None:
        types = library("pyarrow", "parquet").types
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        self.valid: Array = None
        self.places: Array = None
        if array.null_count:
            self.valid = array.is_valid().to_numpy(zero_copy_only=False)
            self.places = self.valid.cumsum() - 1  # among the values that are there
            array = array.drop_null()
        self.array, self.rows, self.offsets = array, None, None
        self.is_number = is_fixed(array.type)
        self.fields: dict[str, _Values] | None = None
        if types.is_struct(array.type):
            names = [field.name for field in array.type]
            self.fields = {name: _Values(array.field(name)) for name in names}
        elif _is_list(array.type):
            self.offsets = array.offsets.to_numpy()
            self.rows = fixed_rows(array.values)
        else:
            self.rows = fixed_rows(array)

    def value(self, row: int) -> Any:
        """The value of a row; ValueError if it is missing."""
        if self.valid is not None:
            if not self.valid[row]:
                raise ValueError("the value is missing (null)")
            row = self.places[row]
        if self.fields is not None:
            return {name: values.value(row) for name, values in self.fields.items()}
        if self.rows is not None:
            if self.offsets is None:
                return _tensor(self.rows[row])
            return _tensor(self.rows[self.offsets[row] : self.offsets[row + 1]])
        if self.offsets is not None or self.is_number:
            raise ValueError("a value is missing (null) in a list")
        return self.array[int(row)].as_py()


def _tensor(rows: object) -> torch.Tensor:
    import numpy

    return torch.from_numpy(numpy.array(rows))


class GroupedDataset(IndexedDataset):
    """Rows of a table in groups that are read as a whole; the last few stay in memory.

    Args:
        path: what messages call it.
        columns: their names.
        transform: called on each sample.
        lengths: of the groups.

    Subclasses define `_read_group` and the handle.
    """

    per_thread = True

    def __init__(
        self,
        path: str,
        columns: list[str],
        transform: Transform | None,
        lengths: Iterable[int],
    ) -> None:
        super().__init__(path, transform)
        self.columns = columns
        self._ends = list(itertools.accumulate(lengths))

    def _read_group(self, handle: object, group: int) -> Handle:
        """A RecordBatch or Table of the columns."""
        raise NotImplementedError

    def _group_name(self, group: int) -> str:
        raise NotImplementedError

    def _read(self, places: Sequence[int]) -> list[object]:
        groups: dict[int, list[tuple[int, int]]] = {}
        for i, at in enumerate(places):
            group, row = located(self._ends, at)
            groups.setdefault(group, []).append((i, row))
        samples: list[object] = [None] * len(places)
        for group, wanted in groups.items():
            values = self._group(group)
            for i, row in wanted:
                samples[i] = self._sample(group, values, row)
        return samples

    def _sample(self, group: int, values: dict[str, _Values], row: int) -> dict[str, object]:
        sample = {}
        for name, column in values.items():
            try:
                sample[name] = column.value(row)
            except ValueError as error:
                place = f"{self._group_name(group)}, record {row}"
                raise FormatError(f"{place}: column {name!r}: {error}") from error
        return sample

    def _group(self, group: int) -> dict[str, _Values]:
        handle, cache = self._handle()
        values: dict[str, _Values] | None = cache.get(group)
        if values is None:
            arrow = library("pyarrow", "parquet")
            with naming(self._group_name(group), arrow.lib.ArrowException):
                table = self._read_group(handle, group)
                table.validate(full=True)  # what damaged offsets point to is not there
                values = {name: _Values(_one_array(table.column(name))) for name in self.columns}
            while len(cache) >= CACHED_GROUPS:
                cache.popitem(last=False)
            cache[group] = values
        cache.move_to_end(group)
        return values


def _one_array(column: Array) -> Array:
    if not hasattr(column, "chunks"):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
