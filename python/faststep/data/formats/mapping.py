"""Files in memory, mapped without a descriptor: a process may have a thousand at most."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from typing import Any

from ..types import Array
from .common import open_regular

__all__ = ["map_array"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """The first bytes of a file, mapped for reading; Python's own mappings keep a descriptor."""

    def __init__(self, path: str, size: int) -> None:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size < size:
                raise ValueError(f"the file has fewer than {size} bytes: it was cut off")
            address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        self._address, self._size, self._unmap = address, size, _libc.munmap
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, True),
        }

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            self._unmap(self._address, self._size)


def map_array(
    path: str, dtype: Any, shape: tuple[int, ...], offset: int = 0, order: Any = "C"
) -> Array:
    """An array that lies in a file, from byte `offset` on, as a numpy.memmap for reading.

    Raises:
        ValueError: the file ends before the array does.
    """
    import numpy

    size = math.prod(shape) * numpy.dtype(dtype).itemsize
    if not size:
        return numpy.empty(shape, dtype, order)
    whole = numpy.asarray(_Mapping(path, offset + size))
    rows = numpy.ndarray(shape, dtype, whole[offset:], order=order).view(numpy.memmap)
    rows.filename, rows.offset, rows.mode = path, offset, "r"
    return rows
