"""What faststep.data.transforms does, one sample and one transform after another in plain torch.

Each function takes the transform, a float32 image (C, H, W) and the sample's random numbers, as
python floats; none knows of windows or of the order in which a pass goes over memory.
"""

import math
import random
from typing import Any

import torch
from torch import Tensor

from faststep.data import transforms as T  # noqa: N812


def pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def crop(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """A part; zeros where there is no image."""
    out = torch.zeros(image.shape[0], height, width)
    for y in range(height):
        for x in range(width):
            if 0 <= top + y < image.shape[1] and 0 <= left + x < image.shape[2]:
                out[:, y, x] = image[:, top + y, left + x]
    return out


def taps(size: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each place of `size`, those of `length` that it lies between, and their weights."""
    scale = torch.tensor(length, dtype=torch.float32) / size
    place = (scale * (torch.arange(size, dtype=torch.float32) + 0.5) - 0.5).clamp(min=0.0)
    first = place.long().clamp(max=length - 1)
    second = (first + 1).clamp(max=length - 1)
    weight = (place - first).clamp(max=1.0)
    return first, second, 1.0 - weight, weight


def covered(size: int, length: int) -> tuple[Tensor, Tensor]:
    """For each place of `size`, the weights of those of `length` from `first` on, one a row."""
    scale = torch.tensor(length, dtype=torch.float32) / size
    reach = scale.clamp(min=1.0)
    center = scale * (torch.arange(size, dtype=torch.float32) + 0.5)
    first = (center - reach + 0.5).int().clamp(min=0)
    last = (center + reach + 0.5).int().clamp(max=length)
    nearest, narrow = first.float() - center + 0.5, 1.0 / reach
    steps = torch.arange(int((last - first).max()), dtype=torch.float32)[:, None]
    heights = (1.0 - ((nearest + steps) * narrow).abs()).clamp(min=0.0)
    heights = torch.where(steps < last - first, heights, 0.0)
    total = torch.zeros(size)
    for row in heights:
        total = total + row
    return first.long(), heights * (1.0 / total)


def smooth(image: Tensor, height: int, width: int) -> Tensor:
    """Bilinear with antialiasing, rows first, each sum from its first place on."""
    first, weights = covered(height, image.shape[1])
    rows = torch.zeros(image.shape[0], height, image.shape[2])
    for i, weight in enumerate(weights):
        rows = rows + weight[:, None] * image[:, (first + i).clamp(max=image.shape[1] - 1)]
    first, weights = covered(width, image.shape[2])
    out = torch.zeros(image.shape[0], height, width)
    for i, weight in enumerate(weights):
        out = out + weight * rows[:, :, (first + i).clamp(max=image.shape[2] - 1)]
    like = torch.nn.functional.interpolate(
        image[None], (height, width), mode="bilinear", antialias=True
    )[0]
    torch.testing.assert_close(out, like, rtol=1e-4, atol=2e-3)  # of pixels up to 255
    return out


def resize(image: Tensor, height: int, width: int, antialias: bool) -> Tensor:
    """Bilinear, rows first; what interpolate does but for the order of its products."""
    if image.shape[1:] == (height, width):
        return image
    if antialias:
        return smooth(image, height, width)
    first, second, w0, w1 = taps(height, image.shape[1])
    rows = w0[:, None] * image[:, first] + w1[:, None] * image[:, second]
    first, second, w0, w1 = taps(width, image.shape[2])
    out: Tensor = w0 * rows[:, :, first] + w1 * rows[:, :, second]
    like = torch.nn.functional.interpolate(image[None], (height, width), mode="bilinear")[0]
    torch.testing.assert_close(out, like, rtol=1e-4, atol=2e-3)  # of pixels up to 255
    return out


def random_resized_crop(t: T.RandomResizedCrop, image: Tensor, u: list[float]) -> Tensor:
    rows, columns = image.shape[1:]
    for i in range(10):
        area = rows * columns * (t.scale[0] + (t.scale[1] - t.scale[0]) * u[i])
        low, high = math.log(t.ratio[0]), math.log(t.ratio[1])
        ratio = math.exp(low + (high - low) * u[10 + i])
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= columns and 0 < height <= rows:
            top, left = int(u[20] * (rows - height + 1)), int(u[21] * (columns - width + 1))
            return resize(crop(image, top, left, height, width), *pair(t.size), t.antialias)
    height, width = rows, columns
    if columns / rows < t.ratio[0]:
        height = round(columns / t.ratio[0])
    elif columns / rows > t.ratio[1]:
        width = round(rows * t.ratio[1])
    top, left = (rows - height) // 2, (columns - width) // 2
    return resize(crop(image, top, left, height, width), *pair(t.size), t.antialias)


def place(t: Any, image: Tensor, u: list[float]) -> Tensor:
    """One transform of geometry."""
    rows, columns = image.shape[1:]
    if isinstance(t, T.RandomHorizontalFlip):
        return image.flip(2) if u[0] < t.p else image
    if isinstance(t, T.CenterCrop):
        height, width = pair(t.size)
        top = round((rows - height) / 2) if rows >= height else -((height - rows) // 2)
        left = round((columns - width) / 2) if columns >= width else -((width - columns) // 2)
        return crop(image, top, left, height, width)
    if isinstance(t, T.RandomCrop):
        height, width = pair(t.size)
        top = int(u[0] * (rows + 2 * t.padding - height + 1)) - t.padding
        left = int(u[1] * (columns + 2 * t.padding - width + 1)) - t.padding
        return crop(image, top, left, height, width)
    if isinstance(t, T.Resize):
        if not isinstance(t.size, int):
            return resize(image, *pair(t.size), t.antialias)
        short = min(rows, columns)
        size = (int(t.size * side / short) for side in (rows, columns))
        return resize(image, *size, t.antialias)
    assert isinstance(t, T.RandomResizedCrop)
    return random_resized_crop(t, image, u)


def normalize(t: Any, images: Tensor, unit: float) -> Tensor:
    """(x * unit - mean) / std as x * scale + bias: two roundings per pixel."""
    mean, std = ((0.0,), (1.0,)) if t is None else (t.mean, t.std)
    scale = torch.tensor([unit / s for s in std], dtype=torch.float64).float()
    bias = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=torch.float64)
    return images * scale[:, None, None] + bias.float()[:, None, None]


def mixed(t: Any, images: Tensor, labels: Tensor | None, u: Tensor) -> tuple[Tensor, Tensor | None]:
    if isinstance(t, T.RandomChoice):
        seeded = random.Random(int(float(u[0, 0]) * 2**53))
        (chosen,) = seeded.choices(range(len(t.transforms)), t.p)
        return mixed(t.transforms[chosen], images, labels, u[1:])
    if t is None:
        return images, labels
    assert labels is not None
    hot = torch.nn.functional.one_hot(labels.long(), t.num_classes).float()
    if isinstance(t, T.OneHot):
        return images, hot
    share = random.Random(int(float(u[0, 0]) * 2**53)).betavariate(t.alpha, t.alpha)
    other = torch.cat([images[-1:], images[:-1]])
    if isinstance(t, T.MixUp):
        images = images * share + other * (1.0 - share)
    else:
        height, width = images.shape[2:]
        half = 0.5 * math.sqrt(1.0 - share)
        row, column = int(float(u[1, 0]) * height), int(float(u[2, 0]) * width)
        inside = torch.zeros(height, width, dtype=torch.bool)
        for y in range(height):
            for x in range(width):
                in_row = row - int(half * height) <= y < row + int(half * height)
                inside[y, x] = in_row and (
                    column - int(half * width) <= x < column + int(half * width)
                )
        images = torch.where(inside, other, images)
        share = 1.0 - float(inside.sum()) / (height * width)
    return images, hot * share + torch.cat([hot[-1:], hot[:-1]]) * (1.0 - share)


def apply(
    transforms: list[Any], images: Tensor, labels: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """All of them on a batch, in fp32 to the end."""
    counts = {T.RandomHorizontalFlip: 1, T.RandomCrop: 2, T.RandomResizedCrop: 22}
    counts |= {T.MixUp: 1, T.CutMix: 3, T.RandomChoice: 4}
    rows = [counts.get(type(t), 0) for t in transforms]
    if transforms and isinstance(transforms[-1], T.RandomChoice):
        rows[-1] = 1 + max(counts.get(type(t), 0) for t in transforms[-1].transforms)
    u = torch.rand(sum(rows), len(images), dtype=torch.float64, generator=generator)
    now = list(images.float())
    last = None
    form = T.ToFloat()
    norm = None
    for t, count in zip(transforms, rows, strict=True):
        numbers, u = u[:count], u[count:]
        if isinstance(t, T.ToFloat):
            form = t
        elif isinstance(t, T.Normalize):
            norm = t
        elif hasattr(t, "num_classes"):
            last = (t, numbers)
        else:
            now = [place(t, image, numbers[:, i].tolist()) for i, image in enumerate(now)]
    unit = 1.0 if images.is_floating_point() else 1 / 255
    out = normalize(norm, torch.stack(now), unit)
    out, labels = mixed(*((last[0], out, labels, last[1]) if last else (None, out, labels, u)))
    return out.to(form.dtype).to(memory_format=form.memory_format), labels
