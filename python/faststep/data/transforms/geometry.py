"""Cropping, resizing and flipping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .framing import Framing, Offset

Size = int | tuple[int, int]
ATTEMPTS = 10  # of RandomResizedCrop, to find a crop that fits


def _pair(name: str, size: Size) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise ValueError(f"{name} must be a positive int or two: (height, width), not {size!r}")
    return pair[0], pair[1]


def _interval(name: str, values: tuple[float, float]) -> None:
    if len(values) != 2 or not 0 < values[0] <= values[1] < math.inf:
        raise ValueError(f"{name} must be two numbers, 0 < low <= high, not {values!r}")


def _up_to(u: Tensor, most: Offset) -> Tensor:
    """A whole number from 0 to `most`, each as likely, from one in [0, 1)."""
    return (u * (most + 1)).long()


class Geometry:
    """A transform that moves pixels. `uniforms` says how many rows of random numbers it takes."""

    uniforms: ClassVar[int] = 0
    resizes: ClassVar[bool] = False

    def apply(self, framing: Framing, u: Tensor) -> None:
        """Change what a batch shows. `u` is (uniforms, N) float64, in [0, 1)."""
        raise NotImplementedError


def _with_pixels(framing: Framing, name: str) -> tuple[int, int]:
    """The size of the images, which must have pixels to be resized."""
    height, width = framing.whole_size
    if not height or not width:
        raise ValueError(f"{name}: the images have no pixels, they are {height} by {width}")
    return height, width


@dataclass(frozen=True)
class RandomHorizontalFlip(Geometry):
    """Left and right change places with probability `p`."""

    p: float = 0.5
    uniforms: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:
            raise ValueError(f"p must be between 0 and 1, not {self.p!r}")

    def apply(self, framing: Framing, u: Tensor) -> None:
        framing.mirror(u[0] < self.p)


def _middle(had: int, size: int) -> int:
    return round((had - size) / 2) if had >= size else -((size - had) // 2)


@dataclass(frozen=True)
class CenterCrop(Geometry):
    """The middle of each image; larger sizes put zeros around it."""

    size: Size

    def __post_init__(self) -> None:
        _pair("size", self.size)

    def apply(self, framing: Framing, u: Tensor) -> None:
        height, width = _pair("size", self.size)
        rows, columns = framing.whole_size
        pads = height > rows or width > columns
        framing.crop(_middle(rows, height), _middle(columns, width), height, width, pads)


@dataclass(frozen=True)
class RandomCrop(Geometry):
    """A part of each image, anywhere; with `padding` zeros on all sides belong to it."""

    size: Size
    padding: int = 0
    uniforms: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _pair("size", self.size)
        if self.padding < 0:
            raise ValueError(f"padding must not be negative: {self.padding!r}")

    def apply(self, framing: Framing, u: Tensor) -> None:
        height, width = _pair("size", self.size)
        rows, columns = (had + 2 * self.padding for had in framing.whole_size)
        if height > rows or width > columns:
            raise ValueError(
                f"RandomCrop: size {(height, width)} is larger than the images, {(rows, columns)} "
                "with their padding"
            )
        top = _up_to(u[0], rows - height) - self.padding
        left = _up_to(u[1], columns - width) - self.padding
        framing.crop(top, left, height, width, pads=self.padding > 0)


@dataclass(frozen=True)
class Resize(Geometry):
    """All of each image, resized bilinearly.

    Args:
        size: of the result; an int is the length of the shorter side, the other keeps the ratio.
        antialias: where images become smaller, weigh all pixels that one of the result covers,
            with a triangle of twice its width, as `torch.nn.functional.interpolate` does with
            `antialias=True`. Default True.
    """

    size: Size
    antialias: bool = True
    resizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _pair("size", self.size)

    def apply(self, framing: Framing, u: Tensor) -> None:
        height, width = _with_pixels(framing, "Resize")
        if not isinstance(self.size, int):
            framing.resize(*_pair("size", self.size), self.antialias)
        elif height <= width:
            framing.resize(self.size, int(self.size * width / height), self.antialias)
        else:
            framing.resize(int(self.size * height / width), self.size, self.antialias)


@dataclass(frozen=True)
class RandomResizedCrop(Geometry):
    """A crop of random area and shape, anywhere, resized bilinearly.

    Args:
        size: of the result.
        scale: the least and the largest share of the image's area.
        ratio: the least and the largest width / height.
        antialias: as for Resize. Default True.
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    antialias: bool = True
    uniforms: ClassVar[int] = 2 * ATTEMPTS + 2
    resizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _pair("size", self.size)
        _interval("scale", self.scale)
        _interval("ratio", self.ratio)

    def apply(self, framing: Framing, u: Tensor) -> None:
        rows, columns = _with_pixels(framing, "RandomResizedCrop")
        low, high = self.scale
        area = rows * columns * (low + (high - low) * u[:ATTEMPTS])
        low, high = (math.log(ratio) for ratio in self.ratio)
        ratio = torch.exp(low + (high - low) * u[ATTEMPTS : 2 * ATTEMPTS])
        widths = (area * ratio).sqrt_().round_()
        heights = (area / ratio).sqrt_().round_()
        fits = (widths > 0) & (widths <= columns) & (heights > 0) & (heights <= rows)
        fit, attempt = fits.max(0)  # the first that fits
        height, width = self._fallback(rows, columns)
        height_of = torch.where(fit, heights.gather(0, attempt[None])[0].long(), height)
        width_of = torch.where(fit, widths.gather(0, attempt[None])[0].long(), width)
        top = torch.where(fit, _up_to(u[-2], rows - height_of), (rows - height) // 2)
        left = torch.where(fit, _up_to(u[-1], columns - width_of), (columns - width) // 2)
        framing.crop(top, left, height_of, width_of, pads=False)
        framing.resize(*_pair("size", self.size), self.antialias)

    def _fallback(self, rows: int, columns: int) -> tuple[int, int]:
        """The largest crop in the middle with a ratio that is allowed."""
        if columns / rows < self.ratio[0]:
            return min(rows, max(1, round(columns / self.ratio[0]))), columns
        if columns / rows > self.ratio[1]:
            return rows, min(columns, max(1, round(rows * self.ratio[1])))
        return rows, columns
