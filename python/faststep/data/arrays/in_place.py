"""Images that transforms read directly from the dataset, without a gathered batch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from .columns import AS_IS, ROW_NUMBERS, Column

MOST_IMAGES = (1 << 31) - 1
MEMORY = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV")  # what Linux maps as it does files


@dataclass(frozen=True)
class ImageRows:
    """Stands for images[rows], which is not made.

    Args:
        images: as Compose takes them, fewer than 2^31, in CPU memory.
        rows: (N,) int64, none of them negative.
    """

    images: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class InPlace:
    """All images, and the field of a batch that gets row numbers instead of images."""

    field: int
    images: torch.Tensor

    def put(self, batch: list[Any]) -> None:
        """Say in a gathered batch which images the numbers are of."""
        batch[self.field] = ImageRows(self.images, batch[self.field])


def row_numbers() -> Column:
    """The column of row numbers that is gathered in the place of the images."""
    prototype = torch.empty(0, dtype=torch.int64, device="cpu")
    return Column(prototype, 0, 0, 0, None, conversion=ROW_NUMBERS)


def images_of(column: Column) -> torch.Tensor | None:
    """The rows of a column, if they are images in memory that a Compose takes.

    Images in a file are None: threads that gather them read the file ahead of the consumer.
    """
    form = column.prototype
    if (
        column.conversion != AS_IS
        or form.dtype not in (torch.uint8, torch.float32)
        or form.dim() != 4
        or column.length > MOST_IMAGES
        or column.mapped
        or _is_of_file(column.address)
    ):
        return None
    owner = column.owner
    if isinstance(owner, torch.Tensor):
        return owner
    item = form.element_size()
    fits = column.stride >= 0 and column.stride % item == column.address % item == 0
    # torch has no tensor that cannot be written, and warns of one
    return torch.from_numpy(owner) if fits and owner.flags.writeable else None


def _is_of_file(address: int) -> bool:
    """True if memory is that of a file; False where the system does not tell."""
    if sys.platform != "linux":
        return False
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, _, _, _, inode, *name = line.split(None, 5)
            first, last = (int(place, 16) for place in span.split("-"))
            if first <= address < last:
                return inode != "0" and not "".join(name).startswith(MEMORY)
    return False
