"""Parquet files, by pyarrow."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from ..types import Handle, State, Transform
from .common import FormatError, PathLike, check_unchanged, file_mark, library, naming, open_regular
from .handles import located, one_of_few
from .shards import shard_names
from .tables import Form, GroupedDataset, chosen_columns, form_of


class ParquetDataset(GroupedDataset):
    """Rows of Parquet files. Each thread of each process opens them for itself, on first use.

    Args:
        paths: a file, a list, or a pattern as "train-{000..041}.parquet" or with * and ?.
        columns: their names; None, the default, for all.
        transform: called on each sample.

    A sample is a dict: tensors for numbers and lists of numbers, str, bytes, and a dict for a
    struct. A row group is read as a whole, and the last two stay in memory: several samples at once
    (`__getitems__`) read each group once, but samples in random order read a group for almost
    each of them. For these, `convert` the files, or keep the groups small. Files are read, not
    mapped; a file that is changed while it is open is an error when its next group is read.

    Raises:
        FormatError: a file is damaged, of other columns than the first, or a column is not there or
            of a type without a place in a sample; when a sample is read, that a value is missing.
        ImportError: pyarrow is not installed.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
    ) -> None:
        self.paths = shard_names(paths)
        self._forms: list[Form] = []
        names: list[str] = []
        self._marks = [file_mark(path) for path in self.paths]
        for path in self.paths:
            with _opened(path) as file, naming(path):
                names = chosen_columns(file.schema_arrow, columns, path)
                self._forms.append(_form(file, names))
            if self._forms[-1].columns != self._forms[0].columns:
                raise FormatError(f"{path} has other columns than {self.paths[0]}")
        lengths = [form.group_lengths for form in self._forms]
        groups = itertools.chain.from_iterable(lengths)
        super().__init__(", ".join(self.paths[:3]), names, transform, groups)
        self._file_ends = list(itertools.accumulate(map(len, lengths)))

    def __setstate__(self, state: State) -> None:
        super().__setstate__(state)
        self._marks = [file_mark(path) for path in self.paths]  # there may be copies of them here

    def _open_handle(self) -> object:
        return OrderedDict(), OrderedDict()

    def _read_group(self, handle: Handle, group: int) -> Handle:
        number, inside = located(self._file_ends, group)
        file = one_of_few(handle, number, self._unchanged)
        table = file.read_row_group(inside, columns=self.columns, use_threads=False)
        check_unchanged(self.paths[number], self._marks[number], file_mark(self.paths[number]))
        return table

    def _unchanged(self, number: int) -> Handle:
        file = _opened(self.paths[number])
        try:
            columns = [name for name in self.columns if name in file.schema_arrow.names]
            check_unchanged(self.paths[number], self._forms[number], _form(file, columns))
        except BaseException:
            file.close()
            raise
        return file

    def _group_name(self, group: int) -> str:
        number, inside = located(self._file_ends, group)
        return f"{self.paths[number]}: row group {inside}"


def _opened(path: str) -> Handle:
    arrow = library("pyarrow", "parquet")
    parquet = library("pyarrow.parquet", "parquet")
    open_regular(path).close()
    with naming(path, arrow.lib.ArrowException):
        return parquet.ParquetFile(path, memory_map=False, page_checksum_verification=True)


def _form(file: Handle, columns: Sequence[str]) -> Form:
    groups = range(file.metadata.num_row_groups)
    lengths = [file.metadata.row_group(i).num_rows for i in groups]
    return form_of(file.schema_arrow, columns, lengths)
