"""JPEG decoders that write to given memory: simplejpeg, and the system's libturbojpeg.

Both are libjpeg-turbo, as Pillow's decoder is: the pixels are the same. They stop where libjpeg
warns, and Pillow decides then: it reads what can be repaired, and refuses what is cut off.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
import threading
from typing import Any, Protocol

from ..types import Array, Handle
from .common import library

DECODERS = ("auto", "simplejpeg", "turbojpeg", "pillow")
SCALES = (8, 4, 2)  # what Pillow has, too


class JpegDecoder(Protocol):
    """Decodes JPEG in RGB, YCbCr or gray."""

    def size(self, data: bytes) -> tuple[int, int] | None:
        """(height, width) by the header; None if this is not for it to decode."""

    def decode(self, data: bytes, pixels: object) -> bool:
        """Fills `pixels`, a packed uint8 array (height, width, 3); False if it cannot."""


def scaled(height: int, width: int, min_size: int | None) -> tuple[int, int]:
    """The size at the smallest scale that leaves no side below `min_size`."""
    for scale in SCALES if min_size is not None else ():
        if min(height, width) // scale >= (min_size or 0):
            return -(-height // scale), -(-width // scale)
    return height, width


class SimpleJpeg:
    """simplejpeg, which brings libjpeg-turbo with it."""

    def __init__(self) -> None:
        self._module = library("simplejpeg", "jpeg")

    def size(self, data: bytes) -> tuple[int, int] | None:
        try:
            height, width, colours, _ = self._module.decode_jpeg_header(data)
        except ValueError:
            return None
        return None if colours in ("CMYK", "YCCK") else (height, width)

    def decode(self, data: bytes, pixels: Array) -> bool:
        height, width = pixels.shape[:2]
        try:
            self._module.decode_jpeg(data, "RGB", min_height=height, min_width=width, buffer=pixels)
        except ValueError:
            return False
        return True


class TurboJpeg:
    """The system's libturbojpeg, by the C API that its versions 1.4 to 3 have.

    PyTurboJPEG does not do: where libjpeg warns, as it does of images that are cut off, it goes
    on with what there is.

    Raises:
        ImportError: there is no such library.
    """

    RGB = 0
    CMYK, YCCK = 3, 4
    STOP_ON_WARNING = 8192

    def __init__(self) -> None:
        self._library = _turbojpeg()
        self._own = threading.local()  # a decompressor serves one thread

    def _decompressor(self) -> Handle:
        found = getattr(self._own, "decompressor", None)
        if found is None:
            found = self._own.decompressor = _Decompressor(self._library)
        return found.handle

    def size(self, data: bytes) -> tuple[int, int] | None:
        width, height, sampling, colours = (ctypes.c_int() for _ in range(4))
        numbers = (ctypes.byref(number) for number in (width, height, sampling, colours))
        failed = self._library.tjDecompressHeader3(self._decompressor(), data, len(data), *numbers)
        if failed or not height.value or colours.value in (self.CMYK, self.YCCK):
            return None  # no height: the data end before the header does
        return height.value, width.value

    def decode(self, data: bytes, pixels: Array) -> bool:
        height, width = pixels.shape[:2]
        failed = self._library.tjDecompress2(
            self._decompressor(),
            data,
            len(data),
            pixels.ctypes.data,
            width,
            pixels.strides[0],
            height,
            self.RGB,
            self.STOP_ON_WARNING,
        )
        return not failed


class _Decompressor:
    """libturbojpeg's state of one thread, which ends with it."""

    def __init__(self, turbojpeg: Handle) -> None:
        self._destroy = turbojpeg.tjDestroy
        self.handle = turbojpeg.tjInitDecompress()
        if not self.handle:
            raise MemoryError("libturbojpeg has no memory for a decompressor")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._destroy(self.handle)


@functools.cache
def _turbojpeg() -> Handle:
    names = {"darwin": ["libturbojpeg.dylib", "libturbojpeg.0.dylib"], "win32": ["turbojpeg.dll"]}
    for name in names.get(sys.platform, ["libturbojpeg.so.0", "libturbojpeg.so"]):
        try:
            found = ctypes.CDLL(name)
        except OSError:
            continue
        pointer, number = ctypes.c_void_p, ctypes.c_int
        ints: list[Any] = [ctypes.POINTER(number)] * 4
        found.tjInitDecompress.restype = pointer
        found.tjDestroy.argtypes = [pointer]
        source: list[Any] = [pointer, ctypes.c_char_p, ctypes.c_ulong]
        found.tjDecompressHeader3.argtypes = [*source, *ints]
        found.tjDecompress2.argtypes = [*source, pointer, number, number, number, number, number]
        return found
    raise ImportError(
        "decoder 'turbojpeg' needs the system's libturbojpeg, which is not installed (Debian's "
        "package is libturbojpeg0): or pip install 'faststep[jpeg]' for simplejpeg"
    )


@functools.cache
def _has_turbojpeg() -> bool:
    try:
        _turbojpeg()
    except ImportError:
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
        if importlib.util.find_spec("simplejpeg"):
            decoder = "simplejpeg"
        else:
            decoder = "turbojpeg" if _has_turbojpeg() else "pillow"
    jpeg_decoder(decoder)
    return decoder


@functools.cache
def jpeg_decoder(name: str) -> JpegDecoder | None:
    """The decoder of this name, which is not "auto"; None for Pillow, which decodes everything.

    Raises:
        ImportError: it is not installed.
    """
    if name == "pillow":
        return None
    return SimpleJpeg() if name == "simplejpeg" else TurboJpeg()
