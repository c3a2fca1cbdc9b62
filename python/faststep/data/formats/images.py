"""Folders of images, one folder for each class."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from ..deliver.batch_buffers import BufferRows, Samples, copy_image, new_rows
from ..types import Transform
from .common import PathLike, library, naming, open_regular, position, walked
from .jpeg import decode_jpeg, decoder_name, jpeg_size, scaled

# torchvision's
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
JPEG = b"\xff\xd8\xff"
MAX_PIXELS = 178_956_970  # where Pillow takes an image for an attack
LONGEST = 16  # times the shorter side; of longer ones only the middle is resized


def decode_image(
    data: bytes,
    decoder: str = "auto",
    min_size: int | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
    max_pixels: int | None = MAX_PIXELS,
) -> torch.Tensor:
    """The pixels of a JPEG, PNG, WebP or other image that Pillow knows.

    Args:
        data: the file's content.
        decoder: for JPEG in RGB, YCbCr or gray "simplejpeg", with Pillow for all others; "pillow";
            or "auto", the default: the first of these that is installed. The pixels are the same.
        min_size: read JPEG at 1/2, 1/4 or 1/8 of its size as long as no side becomes smaller than
            this: faster, but other pixels than reading all and then resizing. Default None: off.
        memory_format: torch.channels_last leaves the pixels as they are decoded, the channels of
            each side by side. Default torch.contiguous_format.
        max_pixels: refuse an image whose header says that it has more, before its pixels are
            read. Default: 178 956 970, where Pillow stops too. None: no limit but Pillow's,
            `PIL.Image.MAX_IMAGE_PIXELS`, for what Pillow reads.

    Returns:
        A uint8 tensor (3, height, width) in RGB. The orientation in EXIF data is not applied, as
        torchvision does not.

    Raises:
        ValueError, OSError: the data are damaged, or there are too many pixels.
    """
    channels_last = _is_channels_last(memory_format)
    image = _pixels(data, decoder_name(decoder), min_size, max_pixels).permute(2, 0, 1)
    return _in_format(image, channels_last)


def _in_format(image: torch.Tensor, channels_last: bool) -> torch.Tensor:
    if channels_last:
        return image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    if image.is_contiguous():
        return image
    out = torch.empty(image.shape, dtype=image.dtype, device="cpu")
    copy_image(image, out)
    return out


def _is_channels_last(memory_format: torch.memory_format) -> bool:
    if memory_format not in (torch.contiguous_format, torch.channels_last):
        raise ValueError(
            "memory_format must be torch.contiguous_format or torch.channels_last, not "
            f"{memory_format!r}"
        )
    return memory_format is torch.channels_last


Room = Callable[[int, int], torch.Tensor | None]


def _check_pixels(height: int, width: int, most: int | None) -> None:
    if most is not None and height * width > most:
        raise ValueError(
            f"an image of {height} by {width} pixels is larger than max_pixels, which is {most}"
        )


def _pixels(
    data: bytes,
    decoder: str,
    min_size: int | None,
    max_pixels: int | None,
    room: Room | None = None,
) -> torch.Tensor:
    """The pixels, (height, width, 3), where `room` has memory for them, or elsewhere."""
    size = jpeg_size(data) if decoder == "simplejpeg" and data.startswith(JPEG) else None
    if size is not None:
        _check_pixels(size[0], size[1], max_pixels)
        size = scaled(*size, min_size)
        pixels = None if room is None else room(*size)
        if pixels is None:
            pixels = torch.empty((*size, 3), dtype=torch.uint8, device="cpu")
        if decode_jpeg(data, pixels.numpy()):
            return pixels
    return _by_pillow(data, min_size, max_pixels)


def resized(image: torch.Tensor, size: int) -> torch.Tensor:
    """The middle square of an image, its shorter side made `size` by bilinear interpolation.

    Args:
        image: a uint8 tensor (channels, height, width).
        size: of the result.

    Returns:
        A uint8 tensor (channels, size, size): what torchvision's Resize and CenterCrop give, to
        within one level where a side is more than 16 times the other. It may be a view.

    Raises:
        ValueError: the image has no pixels.
    """
    height, width = image.shape[1:]
    if not height or not width:
        raise ValueError(f"an image of {height} by {width} pixels cannot be resized")
    shorter = min(height, width)
    whole = [int(size * height / shorter), int(size * width / shorter)]
    for dim in (1, 2):
        if image.shape[dim] > LONGEST * shorter:
            image = _middle(image, dim, whole[dim - 1], size)
            whole[dim - 1] = size
    if whole != [*image.shape[1:]]:
        if 1 in image.shape:  # torch takes its strides, which mean nothing, for channels_last
            image = image.clone(memory_format=torch.contiguous_format)
        image = torch.nn.functional.interpolate(
            image[None], whole, mode="bilinear", antialias=True
        )[0]
    top, left = (round((side - size) / 2) for side in whole)
    return image[:, top : top + size, left : left + size]


def _middle(image: torch.Tensor, dim: int, whole: int, size: int) -> torch.Tensor:
    """The middle `size` pixels of a dimension that is resized to `whole`, without the others."""
    length, scale = image.shape[dim], image.shape[dim] / whole
    reach = max(scale, 1.0)
    centres = (torch.arange(size, dtype=torch.float64) + round((whole - size) / 2) + 0.5) * scale
    first = max(0, int(centres[0] - reach))
    last = min(length, int(centres[-1] + reach) + 1)
    places = torch.arange(first, last, dtype=torch.float64) + 0.5
    weights = (1 - (places - centres[:, None]).abs() / reach).clamp_(min=0)
    weights /= weights.sum(1, keepdim=True)
    part = image.narrow(dim, first, last - first).movedim(dim, -1).double() @ weights.T
    return part.round_().clamp_(0, 255).to(torch.uint8).movedim(-1, dim)


def _by_pillow(data: bytes, min_size: int | None, max_pixels: int | None) -> torch.Tensor:
    image_module = library("PIL.Image", "images")
    import numpy

    try:
        with image_module.open(io.BytesIO(data)) as image:
            if image.format == "EPS":
                raise ValueError(
                    "EPS is not read: Pillow runs another program, Ghostscript, for it"
                )
            _check_pixels(image.height, image.width, max_pixels)
            if min_size is not None:
                image.draft("RGB", (min_size, min_size))
            pixels = numpy.array(image.convert("RGB"))
    except (SyntaxError, struct.error, zlib.error, image_module.DecompressionBombError) as error:
        raise ValueError(str(error)) from error
    return torch.from_numpy(pixels)


class ImageFolder(Dataset[Any]):
    """Images in folders that are named after their classes, as torchvision's ImageFolder.

    Args:
        root: root/CLASS/any/where/x.jpg; the classes are the names of the folders, sorted.
        transform: called on the image, a uint8 tensor (3, height, width) in RGB.
        target_transform: called on the number of the class.
        decoder, min_size, memory_format, max_pixels: as for `decode_image`; "auto" is decided
            here, and `decoder` says how.
        image_size: resize images by their shorter side and cut out the middle, a square of this
            size, as torchvision's Resize and CenterCrop do. With `min_size` of the same value JPEG
            is decoded no larger than that needs. Default None: they stay as they are.

    A sample is the image and the number of its class. `classes`, `class_to_idx`, `samples` and
    `targets` are those of torchvision.

    Where a DataLoader of faststep asks for a batch of images of one size, it gives the memory of
    the batch, and each image is written there once; with torch.channels_last and without a
    `transform` and `image_size` the decoder itself does that. A batch is then channels_last, too.

    Raises:
        FileNotFoundError: there is no class, or a class has no image.
        FormatError: an image is damaged; names the file. Raised when it is read.
    """

    @property
    def fills_rows(self) -> bool:
        """True if the samples are for the loader alone, as no subclass sees or makes them."""
        ours = ImageFolder.__getitem__, ImageFolder.__getitems__
        return (type(self).__getitem__, type(self).__getitems__) == ours

    def __init__(
        self,
        root: PathLike,
        transform: Callable[[torch.Tensor], object] | None = None,
        target_transform: Transform | None = None,
        *,
        decoder: str = "auto",
        min_size: int | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        image_size: int | None = None,
        max_pixels: int | None = MAX_PIXELS,
    ) -> None:
        self.root = os.fspath(root)
        self.transform = transform
        self.target_transform = target_transform
        library("PIL.Image", "images")
        self.decoder = decoder_name(decoder)
        self.min_size = min_size
        self.channels_last = _is_channels_last(memory_format)
        self.image_size = image_size
        self.max_pixels = max_pixels
        for name, size in (("min_size", min_size), ("image_size", image_size)):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        self.classes = sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
        if not self.classes:
            raise FileNotFoundError(f"{self.root}: no folder of a class is in it")
        self.class_to_idx = {name: i for i, name in enumerate(self.classes)}
        self.samples = [
            (path, number)
            for name, number in self.class_to_idx.items()
            for path in _images_in(os.path.join(self.root, name))
        ]
        self.targets = [number for _, number in self.samples]
        if missing := [self.classes[i] for i in set(range(len(self.classes))) - {*self.targets}]:
            raise FileNotFoundError(
                f"{self.root}: no image ({', '.join(IMAGE_SUFFIXES)}) is in {sorted(missing)}"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._sample(index, None, 0)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        if type(self).__getitem__ is not ImageFolder.__getitem__:
            return [self[index] for index in indices]  # a subclass has its own samples
        rows = new_rows(len(indices), self.channels_last)
        return Samples(self._sample(index, rows, i) for i, index in enumerate(indices))

    def _sample(self, index: int, rows: BufferRows | None, place: int) -> tuple[object, object]:
        path, target = self.samples[position(index, len(self.samples), self.root)]
        with open_regular(path) as file:
            data = file.read()
        with naming(f"{path} (record {index})"):
            image = self._read(data, rows, place)
        if self.transform is not None:
            image = self.transform(image)
        if rows is not None:
            image = rows.put(place, image)
        return image, target if self.target_transform is None else self.target_transform(target)

    def _read(self, data: bytes, rows: BufferRows | None, place: int) -> Any:
        """The image as the transform gets it; without one it may be in any order of memory."""

        def room(height: int, width: int) -> torch.Tensor | None:
            assert rows is not None
            row = rows.room(place, (3, height, width), torch.uint8)
            return None if row is None else row.permute(1, 2, 0)

        is_all = self.transform is None and self.image_size is None
        at_once = rows is not None and is_all and self.channels_last
        place_of = room if at_once else None
        pixels = _pixels(data, self.decoder, self.min_size, self.max_pixels, place_of)
        image = pixels.permute(2, 0, 1)
        if self.image_size is not None:
            image = resized(image, self.image_size)
        if rows is not None and self.transform is None:
            return image  # it is copied to its row
        return _in_format(image, self.channels_last)


def _images_in(folder: str) -> list[str]:
    found = []
    for place, names in sorted(walked(folder)):
        found += [
            os.path.join(place, name)
            for name in sorted(names)
            if name.lower().endswith(IMAGE_SUFFIXES)
        ]
    return found
