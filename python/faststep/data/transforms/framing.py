"""Which pixels of the source images a batch shows, after some of its transforms."""

from __future__ import annotations

import torch
from torch import Tensor

Offset = int | Tensor  # the same for all samples, or (N,) int64


class Framing:
    """A crop of each source image, resized to a grid; the batch shows a part of the grid.

    Args:
        height, width: of the source images.

    Attributes:
        size: height and width of the batch now; of a crop that is not resized yet they may differ
            from sample to sample.
    """

    def __init__(self, height: int, width: int) -> None:
        self.size: tuple[Offset, Offset] = (height, width)
        self.source: tuple[Offset, Offset, Offset, Offset] = (0, 0, height, width)  # top, left, ...
        self.first: tuple[Offset, Offset] = (0, 0)  # row and column of the grid that come first
        self.flip: Tensor | None = None  # (N,) bool: after all of this
        self.antialias = False  # where it is resized
        self._grid: tuple[int, int] | None = None  # None: as large as the crop
        self._padded = self._cropped = False

    @property
    def whole_size(self) -> tuple[int, int]:
        """`size` as numbers: it is one for all samples outside of a RandomResizedCrop."""
        height, width = self.size
        assert isinstance(height, int)
        assert isinstance(width, int)
        return height, width

    @property
    def grid(self) -> tuple[Offset, Offset]:
        """The size that the crop is resized to."""
        return self._grid or self.source[2:]

    def crop(self, top: Offset, left: Offset, height: Offset, width: Offset, pads: bool) -> None:
        """Show a part; where it reaches outside, and only if `pads`, pixels are 0.

        Raises:
            ValueError: what it would add zeros to is a part of a resized image.
        """
        if self._cropped and pads:
            self._forget_the_rest()
        if self.flip is not None:
            left = torch.where(self.flip, self.size[1] - width - left, left)
        self.first = (self.first[0] + top, self.first[1] + left)
        self.size = (height, width)
        self._cropped = True
        self._padded |= pads

    def _forget_the_rest(self) -> None:
        """Let the crop end where the batch does: what was cropped away must not come back."""
        if self._grid is not None:
            raise ValueError("a crop that adds zeros comes after another crop of resized images")
        starts = [_at_least(first, 0) for first in self.first]
        ends = [
            _at_least(-_at_least(-(first + size), -length), start)
            for first, size, length, start in zip(
                self.first, self.size, self.source[2:], starts, strict=True
            )
        ]
        top, left = self.source[0] + starts[0], self.source[1] + starts[1]
        self.source = (top, left, ends[0] - starts[0], ends[1] - starts[1])
        self.first = (self.first[0] - starts[0], self.first[1] - starts[1])

    def resize(self, height: int, width: int, antialias: bool) -> None:
        """Resize what is shown; the first time only.

        Raises:
            ValueError: zeros were added to it.
        """
        if self._padded:
            raise ValueError("images cannot be resized after a crop that adds zeros")
        top, left = self.source[0] + self.first[0], self.source[1] + self.first[1]
        self.source = (top, left, *self.size)
        self.first = (0, 0)
        self._grid = self.size = (height, width)
        self.antialias = antialias
        self._cropped = False

    def mirror(self, which: Tensor) -> None:
        """Let left and right change places in some of the samples, (N,) bool."""
        self.flip = which if self.flip is None else self.flip ^ which


def _at_least(place: Offset, low: Offset) -> Offset:
    if isinstance(place, Tensor):
        return place.clamp(min=low)
    return low.clamp(min=place) if isinstance(low, Tensor) else max(place, low)
