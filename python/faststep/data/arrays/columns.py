"""A column: where the rows of one array lie, and what a batch of them looks like."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from ..._torch.held import NotHeld, hold
from ..types import Array
from .structure import Structure

AS_IS = 0
# (type in the array, type in the batch) -> the number of the conversion in csrc/io/table.h
CONVERSIONS = {
    ("uint16", torch.int32): 1,
    ("uint16", torch.int64): 2,
    ("uint32", torch.int64): 3,
}
WIDENED = {
    ("uint8", torch.int64): 10,
    ("int8", torch.int64): 11,
    ("int16", torch.int64): 12,
    ("int32", torch.int64): 13,
}
TO_FLOATS = 14
ROW_NUMBERS = 15  # the row's number instead of the row
# the types that become floats, and their numbers in csrc/base/widen.h
NUMBERS = {"bool": 0, "uint8": 0, "int8": 1, "int16": 2, "int32": 3}
NUMBERS |= {"float16": 4, "bfloat16": 5, "float32": 6, "float64": 7}
# what DLPack takes and gives back as it was: no bits, no quantized numbers, not several in a byte
KINDS = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
KINDS |= {"bfloat16", "float16", "float32", "float64", "complex32", "complex64", "complex128"}
POSITIONS, DOCUMENTS = 3, 6  # added to a number above: places in documents, and their numbers


class NotArrays(Exception):  # noqa: N818 - it says why another way is taken, and is not an error
    """The dataset cannot be read as arrays; the message says why."""


@dataclass(slots=True, eq=False)
class Column:
    """The rows of one array, in memory that `owner` keeps.

    Args:
        prototype: an empty tensor of a batch's type and row shape.
        address: of the first row.
        stride: bytes from row to row.
        length: rows.
        owner: the array.
        mapped: the memory is a file's, and may have to be read first.
        conversion: a value of CONVERSIONS, with POSITIONS or DOCUMENTS added, or of WIDENED, or
            TO_FLOATS, ROW_NUMBERS or AS_IS.
        boundary: for POSITIONS and DOCUMENTS, the token between documents, and whether it is the
            first of one.
        watched: the tensor whose rows these are, if it can move; `owner` is then one over the same
            memory that nobody else has.
        floats: for TO_FLOATS, a value of NUMBERS, the scale, means and stds.
    """

    prototype: torch.Tensor
    address: int
    stride: int
    length: int
    owner: Any
    mapped: bool = False
    conversion: int = AS_IS
    boundary: tuple[int, bool] = (0, False)
    watched: torch.Tensor | None = None
    floats: tuple[int, float, tuple[float, ...], tuple[float, ...]] | None = None

    @property
    def spec(self) -> tuple[object, ...]:
        """The arguments of Gather for a field."""
        spec = (self.prototype, self.conversion, *self.boundary)
        return spec if self.floats is None else (*spec, self.floats)

    @property
    def is_current(self) -> bool:
        """True if the tensor still has its address, type, shape and strides."""
        if self.watched is None:
            return True
        is_there = self.watched.data_ptr() == self.address  # one that is not held moves with it
        return is_there and _place_of(self.watched) == _place_of(self.owner)

    @property
    def form(self) -> tuple[object, ...]:
        """What is the same for all columns of one field."""
        form = self.prototype
        return form.dtype, form.shape, self.conversion, self.boundary, self.floats


class ColumnDataset(Dataset[Any]):
    """A dataset whose samples threads can gather; `__getitem__` gives the same ones.

    The names are private, so that those of a script's subclass do not meet them.
    """

    def _structure(self) -> tuple[Structure, list[str]]:
        """The containers of a sample, and the names of its parts."""
        raise NotImplementedError

    def _columns(self) -> list[tuple[Column, ...]]:
        """The columns of each part of the dataset, one after another: one column per leaf."""
        raise NotImplementedError

    @classmethod
    def _reads_rows_as(cls) -> type:
        """The class that has `_columns`: a script's subclass of it may read in another way."""
        return next(kind for kind in cls.__mro__ if "_columns" in vars(kind))


def column_of(array: object, name: str) -> Column:
    """The column of a tensor or a numpy array.

    Raises:
        NotArrays: it must be read in another way.
    """
    if isinstance(array, torch.Tensor):
        return _of_tensor(array, name)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _of_numpy(numpy, array, name)
    raise NotArrays(f"{name} is a {type(array).__name__}, neither a tensor nor a numpy array")


def check_array(array: object, name: str) -> None:
    """True if torch can hold rows of `array`.

    Raises:
        TypeError: it is no tensor and no numpy array of a type that torch has, or has no rows.
    """
    numpy = sys.modules.get("numpy")
    if not isinstance(array, torch.Tensor):
        if numpy is None or not isinstance(array, numpy.ndarray):
            raise TypeError(f"{name} is a {type(array).__name__}, not a tensor or a numpy array")
        try:
            torch.from_numpy(numpy.empty(0, array.dtype))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name}: {error}") from None
    if not array.ndim:
        raise TypeError(f"{name} has no rows")


def _of_tensor(tensor: torch.Tensor, name: str) -> Column:
    why = None
    if type(tensor) is not torch.Tensor:
        why = f"is a {type(tensor).__name__}"
    elif tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        why = "is not a dense tensor"
    elif tensor.device.type != "cpu":
        why = f"is on {tensor.device}"
    elif (kind := str(tensor.dtype).removeprefix("torch.")) not in KINDS and kind[:6] != "float8":
        why = f"is of the type {kind}"
    elif tensor.requires_grad:
        why = "requires a gradient"
    elif tensor.is_conj() or tensor.is_neg():
        why = "is a conjugated or negated view"
    elif tensor.dim() == 0:
        why = "has no rows"
    elif not tensor[:1].is_contiguous():
        why = f"has rows that are not contiguous (strides {tensor.stride()})"
    elif not _fits_in_storage(tensor):
        why = "has a storage that is too small for it"
    if why:
        raise NotArrays(f"{name} {why}")
    try:
        owner = hold(tensor)
    except NotHeld as reason:
        raise NotArrays(f"{name}: {reason}") from None
    stride = owner.stride(0) * owner.element_size()
    prototype = torch.empty((0, *owner.shape[1:]), dtype=owner.dtype, device="cpu")
    return Column(prototype, owner.data_ptr(), stride, len(owner), owner, watched=tensor)


def _place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    strides = [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    return tensor.data_ptr(), tensor.dtype, tensor.shape, strides


def _fits_in_storage(tensor: torch.Tensor) -> bool:
    """True if a dense tensor's storage has all its elements: it may have been made smaller."""
    if not tensor.numel():
        return True
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return end <= tensor.untyped_storage().nbytes()


def _of_numpy(numpy: Any, array: Array, name: str) -> Column:
    if array.ndim == 0:
        raise NotArrays(f"{name} has no rows")
    if not array[:1].flags.c_contiguous:
        raise NotArrays(f"{name} has rows that are not contiguous (strides {array.strides})")
    prototype = torch.from_numpy(numpy.empty((0, *array.shape[1:]), array.dtype))
    base, mapped = array, False
    while base is not None and not mapped:
        mapped, base = isinstance(base, numpy.memmap), getattr(base, "base", None)
    return Column(prototype, array.ctypes.data, array.strides[0], len(array), array, mapped)
