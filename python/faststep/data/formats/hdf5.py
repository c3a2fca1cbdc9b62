"""HDF5 files, by h5py; mapped where the rows lie in the file as they are in memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..types import Array, Handle, Transform
from .common import (
    FormatError,
    PathLike,
    check_unchanged,
    library,
    naming,
    open_regular,
    same_rows,
)
from .handles import IndexedDataset
from .mapped import MappedArrays, map_array

CHUNK_CACHE = 1 << 25  # bytes per array that stay decompressed
LARGEST = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}  # bytes of a number of torch's
MOST_LINKS = 100  # on the way to one array


def open_hdf5(
    path: PathLike,
    *,
    columns: Sequence[str] | None = None,
    transform: Transform | None = None,
    external: bool = False,
) -> MappedArrays | HDF5Dataset:
    """The rows of the arrays in an HDF5 file: mapped if all of them are contiguous.

    Arguments and errors are those of HDF5Dataset. An array is contiguous if it was made without
    chunks or filters, in the machine's byte order; a file that is mapped must not be written to.
    """
    dataset = HDF5Dataset(path, columns=columns, transform=transform, external=external)
    if transform is None:
        with dataset:
            arrays = {name: _mapped(dataset, name) for name in dataset.columns}
        if all(array is not None for array in arrays.values()):
            again = functools.partial(open_hdf5, columns=dataset.columns, external=external)
            return MappedArrays(arrays, again, dataset.path)
    return dataset


class HDF5Dataset(IndexedDataset):
    """Rows of arrays in an HDF5 file. Each process opens it for itself, on first use.

    Args:
        path: the file.
        columns: names of arrays as "group/name", of one length; None, the default, for all arrays
            in the file but those without dimensions.
        transform: called on each sample.
        external: whether arrays may be read from other files that this one names: by external
            links, external storage and virtual datasets. Default False: they are refused.

    A sample is a dict with a tensor for each array, or str where it has strings. Several samples at
    once (`__getitems__`) are read in as few slices as the chunks allow.

    Raises:
        FormatError: the file is damaged, lacks an array, has one of a type that torch does not
            have or, without `external`, that is read from another file, or their lengths differ;
            when a sample is read, names it.
        ImportError: h5py is not installed.
    """

    is_scarce = True

    def __init__(
        self,
        path: PathLike,
        *,
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
        external: bool = False,
    ) -> None:
        super().__init__(path, transform)
        self.external = external
        with self._opened() as file:  # closed again: a process that forks has nothing open
            self.columns = list(columns) if columns is not None else self._all_arrays(file)
            self._check_places(file)
            for name in self.columns:
                self._check(file, name)
            self._arrays = self._shapes(file)
        lengths = {name: shape[0] for name, (shape, _) in self._arrays.items()}
        self.length = same_rows(self.path, lengths, "columns")

    def _opened(self) -> Handle:
        h5py = library("h5py", "hdf5")
        open_regular(self.path).close()
        with naming(self.path):
            return h5py.File(self.path, "r", rdcc_nbytes=CHUNK_CACHE)

    def _open_handle(self) -> Handle:
        file = self._opened()
        try:
            self._check_places(file)
            check_unchanged(self.path, self._arrays, self._shapes(file))
        except BaseException:
            file.close()
            raise
        return file

    def _shapes(self, file: Handle) -> dict[str, tuple[tuple[int, ...], str]]:
        with naming(self.path, RuntimeError):
            return {name: (file[name].shape, str(file[name].dtype)) for name in self.columns}

    def _all_arrays(self, file: Handle) -> list[str]:
        found: list[str] = []

        def visit(name: str, item: Handle) -> None:
            if hasattr(item, "shape") and item.shape:
                found.append(name)

        with naming(self.path, RuntimeError):
            file.visititems(visit)
        return found

    def _check_places(self, file: object) -> None:
        for name in () if self.external else self.columns:
            place = f"{self.path}: {name!r}"
            with naming(place, RuntimeError):
                _refuse_other_files(file, name, place, set())

    def _check(self, file: Handle, name: str) -> None:
        with naming(f"{self.path}: {name!r}", RuntimeError):
            if name not in file or not getattr(file[name], "shape", None):
                raise FormatError(f"{self.path}: there is no array {name!r}")
            kind = _kind(file[name].dtype)
            if kind is None:
                raise FormatError(
                    f"{self.path}: {name!r} has the type {file[name].dtype}, which torch does not "
                    "have: choose others with columns=[...]"
                )

    def __len__(self) -> int:
        return self.length

    def _read(self, places: Sequence[int]) -> list[object]:
        file = self._handle()
        fields = [self._rows(file, name, places) for name in self.columns]
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*fields, strict=True)]

    def _rows(self, file: Handle, name: str, places: Sequence[int]) -> list[object]:
        """The rows at `places`, which are read from the lowest to the highest."""
        with naming(f"{self.path}: {name!r}", RuntimeError):
            array = file[name]
            kind = _kind(array.dtype)
            source = array.asstr() if kind == "text" else array
        rows: list[object] = [None] * len(places)
        ranked = sorted(range(len(places)), key=places.__getitem__)
        for run in _runs([places[i] for i in ranked], array.chunks[0] if array.chunks else 1):
            first, last = places[ranked[run.start]], places[ranked[run.stop - 1]]
            what = f"record {first}" if first == last else f"records {first} to {last}"
            with naming(f"{self.path}: {name!r}, {what}", RuntimeError):
                span = source[first : last + 1]
                for i in ranked[run.start : run.stop]:
                    rows[i] = _value(span[places[i] - first], kind)
        return rows


def _kind(dtype: Any) -> str | None:
    """How rows of this type become values; None if they cannot."""
    h5py = library("h5py", "hdf5")
    if h5py.check_string_dtype(dtype) is not None:
        return "text"
    inner = h5py.check_vlen_dtype(dtype) or dtype
    return "number" if inner.kind in "biufc" and inner.itemsize <= LARGEST[inner.kind] else None


def _value(row: Any, kind: str | None) -> object:
    import numpy

    if kind == "text":
        return row if isinstance(row, str) else row.tolist()
    row = numpy.asarray(row)
    return torch.from_numpy(numpy.array(row, dtype=row.dtype.newbyteorder("=")))


def _runs(places: list[int], chunk: int) -> list[range]:
    """Parts of the sorted places that one read may cover: neighbours, or in the same chunk."""
    runs, begin = [], 0
    for i in range(1, len(places) + 1):
        if i < len(places):
            gap = places[i] - places[i - 1]
            if gap <= 1 or places[i] // chunk == places[i - 1] // chunk:
                continue
        if begin < i:
            runs.append(range(begin, i))
        begin = i
    return runs


def _mapped(dataset: HDF5Dataset, name: str) -> Array:
    """The array's rows in the file, mapped; None if they do not lie there so."""
    import numpy

    with naming(f"{dataset.path}: {name!r}", RuntimeError):
        array = dataset._handle()[name]
        is_plain = array.chunks is None and array.external is None and not array.is_virtual
        is_plain = is_plain and array.file == dataset._handle()  # no external link leads to it
        if not is_plain or not array.size or array.dtype.kind not in "biufc":
            return None
        offset = array.id.get_offset()
        if offset is None or not array.dtype.isnative:
            return None
        rows = map_array(dataset.path, array.dtype, array.shape, offset)
        ends = [numpy.asarray(array[i]).tobytes() == rows[i].tobytes() for i in (0, len(rows) - 1)]
    return rows if all(ends) else None


def _refuse_other_files(file: object, name: str, place: str, seen: set[str]) -> None:
    """
    Raises:
        FormatError: the array is read from other files, through an external link, external storage
            or virtual sources; names one.
    """
    array = _found(file, name, place)
    if array is None or not hasattr(array, "shape") or array.name in seen:
        return
    seen.add(array.name)
    if array.external:
        raise _other(place, array.external[0][0], "external storage")
    for source in array.virtual_sources() if array.is_virtual else []:
        if source.file_name != ".":
            raise _other(place, source.file_name, "a virtual source")
        if "%" in source.dset_name:
            raise _other(place, source.dset_name, "virtual sources with a pattern as a name")
        _refuse_other_files(file, source.dset_name, place, seen)


def _found(file: object, name: str, place: str) -> Handle:
    """The object that a name stands for, link by link; None if there is nothing."""
    h5py = library("h5py", "hdf5")
    found, parts, links = file, name.split("/")[::-1], 0
    while parts:
        part = parts.pop()
        if part in ("", "."):
            continue
        if not isinstance(found, h5py.Group):
            return None
        link = found.get(part, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise _other(place, link.filename, "an external link")
        if isinstance(link, h5py.SoftLink):
            links += 1
            if links > MOST_LINKS:
                raise FormatError(f"{place}: links lead to links without end")
            if link.path.startswith("/"):
                found = file
            parts += link.path.split("/")[::-1]
        elif link is None:
            return None
        else:
            found = found[part]
    return found


def _other(place: str, source: str, kind: str) -> FormatError:
    return FormatError(
        f"{place} is read from another file, {source!r} ({kind}), which is refused unless asked "
        "for: open it with external=True"
    )
