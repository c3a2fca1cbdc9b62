"""Arrays whose rows are converted to another type, and normalized if asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..types import Array
from .columns import CONVERSIONS, NUMBERS, TO_FLOATS, WIDENED, Column, check_array, column_of

Numbers = float | Sequence[float] | torch.Tensor  # one, or one for each channel
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def converted(
    array: object,
    dtype: torch.dtype,
    *,
    scale: float = 1.0,
    mean: Numbers | None = None,
    std: Numbers | None = None,
) -> Converted:
    """An array for ArrayDataset whose samples have another type, and are normalized if asked.

    The C threads that gather a batch convert it on the way: there is no second pass over it. The
    bits are those of torch's operators: `x = x.to(torch.float32)`; where `scale`, `mean` or `std`
    is given `x = (x * scale - mean) / std` in float32, the three numbers too, each operation
    rounded; then `x.to(dtype)`. With `scale=1 / 255` that is what torchvision's
    `transforms.v2.ToDtype(torch.float32, scale=True)` and `Normalize` compute of bytes, with
    `std=255` alone `x.float().div(255)`.

    Args:
        array: a tensor or numpy array (memory maps too).
        dtype: torch.float32, torch.bfloat16 or torch.float16, of bool, uint8, int8, int16, int32,
            float16, bfloat16, float32 or float64; torch.int64 of uint8, int8, int16, int32, uint16
            or uint32; torch.int32 of uint16; or the array's own.
        scale: every number is multiplied by it. For floats only, like `mean` and `std`.
        mean, std: a number, or one for each element of a sample's first dimension: the channels of
            an image (channels, height, width), the columns of a row. By default 0 and 1.

    ArrayDataset raises the errors, which name the array: a TypeError for other types, a ValueError
    where `mean` or `std` has another shape, or where in float32 a number is not finite or `std` 0.

    Example:
        >>> images = converted(images, torch.float32, scale=1 / 255, mean=(0.5, 0.4, 0.4))
        >>> dataset = ArrayDataset({"image": images, "label": converted(labels, torch.int64)})
    """
    return Converted(array, dtype, scale, mean, std)


@dataclass(eq=False)
class Converted:
    """The result of `converted`. `check` is called before all other methods."""

    array: Array
    dtype: torch.dtype
    scale: float
    mean: Numbers | None
    std: Numbers | None
    _normal: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.array)

    @property
    def _source(self) -> str:
        return str(self.array.dtype).removeprefix("torch.")

    @property
    def _keeps_type(self) -> bool:
        return str(self.dtype) == f"torch.{self._source}" and self._normal is None

    def check(self, name: str) -> None:
        """Checks the arguments, and keeps scale, mean and std as float32.

        Raises:
            TypeError, ValueError: as `converted` says.
        """
        check_array(self.array, name)
        normal = self._read_normal(name)
        is_normal = self.mean is not None or self.std is not None or normal[0].item() != 1.0
        self._normal = normal if is_normal else None
        to_floats = self.dtype in FLOATS and self._source in NUMBERS
        if self._normal is not None and not to_floats:
            raise TypeError(
                f"{name}: scale, mean and std are for numbers that become floats, not for "
                f"{self._source} as {self.dtype}"
            )
        is_wider = (self._source, self.dtype) in CONVERSIONS | WIDENED
        if not (to_floats or is_wider or self._keeps_type):
            raise TypeError(
                f"{name}: {self._source} as {self.dtype}; there are {', '.join(NUMBERS)} as "
                f"{', '.join(map(str, FLOATS))}, and integers as wider ones: see "
                "faststep.data.converted"
            )

    def _read_normal(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = tuple(self.array.shape[1:])
        scale = _read_numbers(self.scale, f"{name}: scale", ())
        mean = _read_numbers(0.0 if self.mean is None else self.mean, f"{name}: mean", shape)
        std = _read_numbers(1.0 if self.std is None else self.std, f"{name}: std", shape)
        if not std.all():
            raise ValueError(f"{name}: std is 0 in float32: {self.std}")
        form = mean.shape if mean.dim() else std.shape
        return scale, mean.expand(form), std.expand(form)

    def row(self, index: int) -> torch.Tensor:
        """Converts one row with torch's operators, to the same bits as the C threads."""
        row = row_of_leaf(self.array, index)
        if self.dtype in FLOATS and not self._keeps_type:
            row = row.to(torch.float32)
        if self._normal is not None:
            scale, mean, std = self._normal
            row = (row * scale - mean) / std
        return row.to(self.dtype)

    def column(self, name: str) -> Column:
        """As column_of."""
        column = column_of(self.array, name)
        if self._keeps_type:
            return column
        column.prototype = torch.empty(column.prototype.shape, dtype=self.dtype, device="cpu")
        if self.dtype not in FLOATS:
            column.conversion = (CONVERSIONS | WIDENED)[self._source, self.dtype]
            return column
        scale, means, stds = 1.0, (), ()
        if self._normal is not None:
            scale = self._normal[0].item()
            means, stds = (tuple(numbers.flatten().tolist()) for numbers in self._normal[1:])
        column.conversion = TO_FLOATS
        column.floats = (NUMBERS[self._source], scale, means, stds)
        return column


def _read_numbers(value: object, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A number, or one per element of the first dimension, such that rows of `shape` take it."""
    try:
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(value, dtype=torch.float64, device="cpu")
        numbers: torch.Tensor = value.detach().to("cpu", torch.float32, copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: {error}") from None
    if numbers.dim() and (not shape or numbers.shape != shape[:1]):
        raise ValueError(
            f"{name} has the shape {tuple(numbers.shape)}, a sample {shape}: expected a number"
            + (f", or {shape[0]} of them" if shape else "")
        )
    if not numbers.isfinite().all():
        raise ValueError(f"{name} is not finite in float32: {value.tolist()}")
    return numbers.view(-1, *(1,) * (len(shape) - 1)) if numbers.dim() else numbers


def check_leaf(leaf: object, name: str) -> None:
    """As check_array, for what ArrayDataset takes."""
    if isinstance(leaf, Converted):
        leaf.check(name)
    else:
        check_array(leaf, name)


def column_of_leaf(leaf: object, name: str) -> Column:
    """As column_of, for what ArrayDataset takes."""
    return leaf.column(name) if isinstance(leaf, Converted) else column_of(leaf, name)


def row_of_leaf(leaf: Any, index: int) -> torch.Tensor:
    """A sample of one array."""
    if isinstance(leaf, Converted):
        return leaf.row(index)
    if isinstance(leaf, torch.Tensor):
        return leaf[index]
    import numpy

    return torch.from_numpy(numpy.array(leaf[index]))
