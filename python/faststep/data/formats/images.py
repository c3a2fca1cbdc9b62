"""Folders of images, one folder for each class."""

from __future__ import annotations

import importlib.util
import io
import os
import struct
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

from .common import PathLike, library, naming, position

__all__ = ["IMAGE_SUFFIXES", "ImageFolder", "decode_image", "resized"]

# torchvision's
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
JPEG = b"\xff\xd8\xff"
DECODERS = ("auto", "simplejpeg", "pillow")


def decode_image(data: bytes, decoder: str = "auto", min_size: int | None = None) -> torch.Tensor:
    """The pixels of a JPEG, PNG, WebP or other image that Pillow knows.

    Args:
        data: the file's content.
        decoder: "simplejpeg", for JPEG in RGB, YCbCr or gray, with Pillow for all others; "pillow";
            or "auto", the default: simplejpeg if it is installed.
        min_size: read JPEG at 1/2, 1/4 or 1/8 of its size as long as no side becomes smaller than
            this: faster, but other pixels than reading all and then resizing. Default None: off.

    Returns:
        A uint8 tensor (3, height, width) in RGB. The orientation in EXIF data is not applied, as
        torchvision does not.

    Raises:
        ValueError, OSError: the data are damaged.
    """
    if data.startswith(JPEG) and decoder != "pillow":
        pixels = _by_simplejpeg(data, min_size)
        if pixels is not None:
            return pixels
    return _by_pillow(data, min_size)


def resized(image: torch.Tensor, size: int) -> torch.Tensor:
    """The middle square of an image, its shorter side made `size` by bilinear interpolation.

    Args:
        image: a uint8 tensor (channels, height, width).
        size: of the result.

    Returns:
        A uint8 tensor (channels, size, size): what torchvision's Resize and CenterCrop give.
    """
    height, width = image.shape[1:]
    shorter = min(height, width)
    scaled = [int(size * height / shorter), int(size * width / shorter)]
    if scaled != [height, width]:
        image = torch.nn.functional.interpolate(
            image[None], scaled, mode="bilinear", antialias=True
        )[0]
    top, left = (round((side - size) / 2) for side in scaled)
    return image[:, top : top + size, left : left + size].contiguous()


def check_decoder(decoder: str) -> str:
    """The decoder that "auto" means here.

    Raises:
        ValueError: there is none of this name.
        ImportError: it is not installed.
    """
    if decoder not in DECODERS:
        raise ValueError(f"decoder {decoder!r} is not in {DECODERS}")
    if decoder == "auto":
        decoder = "simplejpeg" if importlib.util.find_spec("simplejpeg") else "pillow"
    library("PIL.Image", "images")
    if decoder == "simplejpeg":
        library("simplejpeg", "jpeg")
    return decoder


def _by_simplejpeg(data: bytes, min_size: int | None) -> torch.Tensor | None:
    """None where Pillow has to do it, or to say what is wrong: CMYK, and heads it cannot read."""
    simplejpeg = library("simplejpeg", "jpeg")
    try:
        if simplejpeg.decode_jpeg_header(data)[2] in ("CMYK", "YCCK"):
            return None
    except ValueError:
        return None
    least = min_size or 0
    pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=least, min_width=least)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _by_pillow(data: bytes, min_size: int | None) -> torch.Tensor:
    image_module = library("PIL.Image", "images")
    import numpy

    try:
        with image_module.open(io.BytesIO(data)) as image:
            if min_size is not None:
                image.draft("RGB", (min_size, min_size))
            pixels = numpy.array(image.convert("RGB"))
    except (SyntaxError, struct.error, zlib.error, image_module.DecompressionBombError) as error:
        raise ValueError(str(error)) from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


class ImageFolder(Dataset[Any]):
    """Images in folders that are named after their classes, as torchvision's ImageFolder.

    Args:
        root: root/CLASS/any/where/x.jpg; the classes are the names of the folders, sorted.
        transform: called on the image, a uint8 tensor (3, height, width) in RGB.
        target_transform: called on the number of the class.
        decoder, min_size: as for `decode_image`; "auto" is decided here, and `decoder` says how.

    A sample is the image and the number of its class. `classes`, `class_to_idx`, `samples` and
    `targets` are those of torchvision.

    Raises:
        FileNotFoundError: there is no class, or a class has no image.
        FormatError: an image is damaged; names the file. Raised when it is read.
    """

    def __init__(
        self,
        root: PathLike,
        transform: Callable[[torch.Tensor], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        *,
        decoder: str = "auto",
        min_size: int | None = None,
    ) -> None:
        self.root = os.fspath(root)
        self.transform = transform
        self.target_transform = target_transform
        self.decoder = check_decoder(decoder)
        self.min_size = min_size
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
        path, target = self.samples[position(index, len(self.samples), self.root)]
        with open(path, "rb") as file:
            data = file.read()
        with naming(f"{path} (record {index})"):
            image: Any = decode_image(data, self.decoder, self.min_size)
        if self.transform is not None:
            image = self.transform(image)
        return image, target if self.target_transform is None else self.target_transform(target)


def _images_in(folder: str) -> list[str]:
    found = []
    for place, _, names in sorted(os.walk(folder, followlinks=True)):
        found += [
            os.path.join(place, name)
            for name in sorted(names)
            if name.lower().endswith(IMAGE_SUFFIXES)
        ]
    return found
