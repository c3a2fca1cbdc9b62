"""A batch of images given as row numbers of the dataset's array of images."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["ImageRows"]


@dataclass(frozen=True)
class ImageRows:
    """Stands for images[rows], which is not made.

    Args:
        images: as Compose takes them, fewer than 2^31, in CPU memory.
        rows: (N,) int64, none of them negative.
    """

    images: Tensor
    rows: Tensor
