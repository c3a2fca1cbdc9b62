"""Transforms of a batch of images on CUDA: faststep, and torch's operators in two ways."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from contenders import OURS, Round
from cuda_works import TINY
from faststep.data import transforms
from workloads import Work

__all__ = ["ONE_BY_ONE", "WHOLE", "image_batch", "image_rounds", "image_work"]

ONE_BY_ONE = "torch, image by image"
WHOLE = "torch, grid_sample"  # without antialiasing
COUNT, SOURCE, SIZE = (2, 16, 12) if TINY else (128, 256, 224)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SCALE, RATIO = (0.25, 1.0), (3 / 4, 4 / 3)


def image_work() -> Work:
    """A batch of pictures as bytes, cropped to pictures in fp32."""
    label = f"{COUNT} x 3 x {SOURCE} x {SOURCE} to {SIZE} x {SIZE}, uint8 to fp32"
    return Work("cuda images", label, ((COUNT, 3, SIZE, SIZE),))


def _boxes(count: int, source: int, generator: torch.Generator) -> list[tuple[int, int, int, int]]:
    """Top, left, height and width of crops with random areas and ratios."""
    drawn = torch.rand(count, 4, generator=generator).tolist()
    boxes = []
    for area, ratio, top, left in drawn:
        side = source * math.sqrt(SCALE[0] + area * (SCALE[1] - SCALE[0]))
        root = math.sqrt(RATIO[0] * (RATIO[1] / RATIO[0]) ** ratio)
        height, width = (min(source, max(1, round(n))) for n in (side / root, side * root))
        boxes.append((int(top * (source - height)), int(left * (source - width)), height, width))
    return boxes


def _ours(images: Tensor) -> Round:
    compose = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, scale=SCALE, ratio=RATIO),
            transforms.RandomHorizontalFlip(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    generator = torch.Generator().manual_seed(0)
    return lambda: compose(images, generator=generator)


def _one_by_one(images: Tensor) -> Round:
    generator = torch.Generator().manual_seed(0)
    mean, std = (torch.tensor(n, device=images.device).view(3, 1, 1) for n in (MEAN, STD))

    def round_() -> Tensor:
        flips = torch.rand(len(images), generator=generator).tolist()
        done = []
        boxes = _boxes(len(images), images.shape[-1], generator)
        for image, flip, (top, left, height, width) in zip(images, flips, boxes, strict=True):
            crop = image[None, :, top : top + height, left : left + width].float() / 255
            size = (SIZE, SIZE)
            resized = F.interpolate(crop, size, mode="bilinear", antialias=True)[0]
            done.append(((resized.flip(-1) if flip < 0.5 else resized) - mean) / std)
        return torch.stack(done)

    return round_


def _whole(images: Tensor) -> Round:
    generator = torch.Generator().manual_seed(0)
    device = images.device
    mean, std = (torch.tensor(n, device=device).view(3, 1, 1) for n in (MEAN, STD))

    def round_() -> Tensor:
        flips = torch.rand(len(images), generator=generator).tolist()
        source, rows = images.shape[-1], []
        boxes = _boxes(len(images), source, generator)
        for flip, (top, left, height, width) in zip(flips, boxes, strict=True):
            sign = -1.0 if flip < 0.5 else 1.0
            x, y = ((2 * at + n) / source - 1 for at, n in ((left, width), (top, height)))
            rows.append(((sign * width / source, 0.0, x), (0.0, height / source, y)))
        theta = torch.tensor(rows).to(device, non_blocking=True)
        grid = F.affine_grid(theta, [len(images), 3, SIZE, SIZE], align_corners=False)
        return (F.grid_sample(images.float() / 255, grid, align_corners=False) - mean) / std

    return round_


def image_batch() -> Tensor:
    """The pictures."""
    return torch.randint(0, 256, (COUNT, 3, SOURCE, SOURCE), dtype=torch.uint8)


def image_rounds(images: Tensor) -> Mapping[str, Round]:
    """What crops, flips and normalizes the images, for each contender."""
    return {OURS: _ours(images), WHOLE: _whole(images), ONE_BY_ONE: _one_by_one(images)}
