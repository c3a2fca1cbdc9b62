"""simplejpeg, a JPEG decoder that writes to given memory.

It is libjpeg-turbo, as Pillow's decoder is: the pixels are the same. It stops where libjpeg warns,
and Pillow decides then: it reads what can be repaired, and refuses what is cut off.
"""

from __future__ import annotations

import functools
import importlib.util

from ..types import Array
from .common import library

DECODERS = ("auto", "simplejpeg", "pillow")
SCALES = (8, 4, 2)  # what Pillow has, too


def scaled(height: int, width: int, min_size: int | None) -> tuple[int, int]:
    """The size at the smallest scale that leaves no side below `min_size`."""
    for scale in SCALES if min_size is not None else ():
        if min(height, width) // scale >= (min_size or 0):
            return -(-height // scale), -(-width // scale)
    return height, width


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) by the header; None if it is not in RGB, YCbCr or gray, or is damaged."""
    try:
        height, width, colours, _ = library("simplejpeg", "jpeg").decode_jpeg_header(data)
    except ValueError:
        return None
    return None if colours in ("CMYK", "YCCK") else (height, width)


def decode_jpeg(data: bytes, pixels: Array) -> bool:
    """Fills `pixels`, a packed uint8 array (height, width, 3); False if it cannot."""
    height, width = pixels.shape[:2]
    decode = library("simplejpeg", "jpeg").decode_jpeg
    try:
        decode(data, "RGB", min_height=height, min_width=width, buffer=pixels)
    except ValueError:
        return False
    return True


@functools.cache
def decoder_name(decoder: str) -> str:
    """The decoder that "auto" means here.

    Raises:
        ValueError: there is none of this name.
        ImportError: it is not installed.
    """
    if decoder not in DECODERS:
        raise ValueError(f"decoder {decoder!r} is not in {DECODERS}")
    if decoder == "auto":
        decoder = "simplejpeg" if importlib.util.find_spec("simplejpeg") else "pillow"
    if decoder == "simplejpeg":
        library("simplejpeg", "jpeg")
    return decoder
