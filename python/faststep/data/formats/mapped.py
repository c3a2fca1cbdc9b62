"""Files that are arrays already: .npy, safetensors, and what `convert` writes.

They are mapped without a descriptor: a process may have a thousand at most.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import tokenize
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..arrays.array_dataset import ArrayDataset
from ..types import Array
from .common import (
    FormatError,
    PathLike,
    check_unchanged,
    library,
    naming,
    open_regular,
    same_rows,
)

# that of a .npy file is a piece of Python
BAD_HEADER = SyntaxError, tokenize.TokenError, RecursionError, MemoryError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
MAP_NORESERVE = 0x4000  # Linux's: a file may be larger than the memory
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """The first bytes of a file, mapped; Python's own mappings keep a descriptor."""

    def __init__(self, path: str, size: int, private: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if private else 0)
        flags = mmap.MAP_PRIVATE | MAP_NORESERVE if private else mmap.MAP_SHARED
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size < size:
                raise ValueError(f"the file has fewer than {size} bytes: it was cut off")
            address = _libc.mmap(None, size, access, flags, file.fileno(), 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        self._address, self._size, self._unmap = address, size, _libc.munmap
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, not private),
        }

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            self._unmap(self._address, self._size)


def map_array(
    path: str,
    dtype: Any,
    shape: tuple[int, ...],
    offset: int = 0,
    order: Any = "C",
    private: bool = False,
) -> Array:
    """An array that lies in a file, from byte `offset` on, as a numpy.memmap for reading.

    A `private` one may be written, which the file does not notice.

    Raises:
        ValueError: the file ends before the array does.
    """
    import numpy

    size = math.prod(shape) * numpy.dtype(dtype).itemsize
    if not size:
        return numpy.empty(shape, dtype, order)
    whole = numpy.asarray(_Mapping(path, offset + size, private))
    rows = numpy.ndarray(shape, dtype, whole[offset:], order=order).view(numpy.memmap)
    rows.filename, rows.offset, rows.mode = path, offset, "r"
    return rows


class MappedArrays(ArrayDataset):
    """An ArrayDataset over a mapped file. A pickled one holds how to open it, not the data.

    Args:
        data: as for ArrayDataset.
        opener: makes it again, from `arguments`; the first is the file, or has a `path`.
    """

    def __init__(self, data: object, opener: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(data)
        self._again = opener, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return reopened, (*self._again, self.form())

    def form(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, type and shape of each array."""
        return [(name, str(array.dtype), tuple(array.shape)) for name, array in self.leaves]


def reopened(opener: Callable[..., Any], arguments: tuple[Any, ...], form: object) -> object:
    """A dataset as it was pickled.

    Raises:
        FormatError: it has another form.
    """
    dataset = opener(*arguments)
    now = dataset.form() if hasattr(dataset, "form") else type(dataset).__name__
    check_unchanged(getattr(arguments[0], "path", arguments[0]), form, now)
    return dataset


def map_npy(path: str) -> Array:
    """The array in a .npy file, mapped."""
    import numpy

    open_regular(path).close()
    with naming(path, *BAD_HEADER):
        found = numpy.lib.format.open_memmap(path, mode="r")
        order = "C" if found.flags.c_contiguous else "F"
        return map_array(path, found.dtype, found.shape, found.offset, order)


def open_npy(path: PathLike) -> MappedArrays:
    """The rows of a .npy file, mapped.

    Raises:
        FormatError: it is cut off, or of a type that torch does not have.
    """
    path = os.fspath(path)
    with naming(path):
        return MappedArrays(map_npy(path), open_npy, path)


def open_npz(
    path: PathLike, *, read: bool = False, columns: Sequence[str] | None = None
) -> ArrayDataset:
    """The rows of the arrays in an .npz file, with `read` into memory: they cannot be mapped.

    Args:
        path: the file.
        read: whether to read it.
        columns: names of arrays, all with the same size in the first dimension; None, the default,
            for all.

    Raises:
        FormatError: without `read`, always, as the file may be larger than the memory; the file is
            damaged, lacks an array, or its arrays have different numbers of rows.
    """
    import zipfile
    import zlib

    import numpy

    path = os.fspath(path)
    if not read:
        raise FormatError(
            f"{path}: the arrays of an .npz file cannot be mapped: make files that can be with "
            f"`python -m faststep convert {path} DIRECTORY`, or read it into memory with read=True"
        )
    open_regular(path).close()
    arrays = {}
    # the last for encrypted ones
    unreadable = (*BAD_HEADER, zipfile.BadZipFile, zlib.error, RuntimeError)
    with naming(path, *unreadable), numpy.load(path, allow_pickle=False) as file:
        for name in file.files if columns is None else columns:
            if name not in file.files:
                raise FormatError(f"{path}: there is no array {name!r} among {file.files}")
            with naming(f"{path}: {name!r}", *unreadable):
                arrays[name] = file[name]
                if not getattr(arrays[name], "ndim", 0):
                    raise FormatError(f"{path}: {name!r} is no array, or has no rows")
    same_rows(path, {name: len(array) for name, array in arrays.items()}, "columns")
    with naming(path):
        return ArrayDataset(arrays)


def open_safetensors(path: PathLike, *, columns: Sequence[str] | None = None) -> MappedArrays:
    """The rows of the tensors in a safetensors file, mapped, as a dict.

    Args:
        path: the file.
        columns: names of tensors, all with the same size in the first dimension; None, the default,
            for all.

    Raises:
        FormatError: the file is damaged, lacks a tensor, or their numbers of rows differ.
        ImportError: safetensors is not installed.
    """
    safetensors = library("safetensors", "safetensors")
    path = os.fspath(path)
    open_regular(path).close()
    tensors: dict[str, torch.Tensor] = {}
    with (
        naming(path, safetensors.SafetensorError),
        safetensors.safe_open(path, framework="pt", device="cpu") as file,
    ):
        present = set(file.keys())
        for name in sorted(present) if columns is None else columns:
            if name not in present:
                raise FormatError(f"{path}: there is no tensor {name!r} among {sorted(present)}")
            tensors[name] = file.get_tensor(name)
            if not tensors[name].ndim:
                raise FormatError(f"{path}: {name!r} has no rows")
    same_rows(path, {name: len(tensor) for name, tensor in tensors.items()}, "columns")
    return MappedArrays(tensors, functools.partial(open_safetensors, columns=columns), path)


def viewed_as(array: Array, dtype: torch.dtype) -> Array:
    """A mapped numpy array of integers, seen as a type that numpy does not have."""
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    where = array.filename, array.dtype, array.shape, array.offset
    # torch warns of memory that must not be written
    return torch.from_numpy(map_array(*where, private=True)).view(dtype)
