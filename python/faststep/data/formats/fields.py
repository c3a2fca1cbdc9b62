"""Samples whose fields are files of an archive, in the manner of WebDataset."""

from __future__ import annotations

import gzip
import io
import json
import posixpath
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..types import Parse, Transform
from .common import FormatError, naming
from .images import decode_image
from .mapped import BAD_HEADER

PIECE = 1 << 20  # bytes; how much more memory than there is data a wrong length may ask for
MOST_UNPACKED = 1 << 30  # bytes of a file in gzip


def key_and_field(name: str) -> tuple[str, str] | None:
    """To which sample a file belongs, and as what; None for one without a name or a suffix."""
    folder, base = posixpath.split(name)
    stem, dot, field = base.partition(".")
    return (posixpath.join(folder, stem), field.lower()) if stem and dot else None


def decode_npy(data: bytes) -> torch.Tensor:
    """The array of a .npy file."""
    import numpy

    return torch.from_numpy(numpy.load(io.BytesIO(data), allow_pickle=False))


def _text(data: bytes) -> str:
    return data.decode("utf-8")


BASIC: Mapping[str, Parse] = {
    **dict.fromkeys(("cls", "cls2", "count", "id", "index", "inx"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "ppm", "pgm", "bmp"), decode_image),
    "npy": decode_npy,
}


class WithFields:
    """A dataset whose samples have files of an archive as fields."""

    def _set_fields(
        self,
        decoders: Mapping[str, Parse],
        columns: Sequence[str] | None,
        transform: Transform | None,
    ) -> None:
        self.decoders = {name.lower(): decode for name, decode in decoders.items()}
        self.columns = None if columns is None else [name.lower() for name in columns]
        self.transform = transform

    def _chosen(self, there: Sequence[str], place: str) -> list[str]:
        """Those to read of the fields that are there; FormatError if one is not."""
        names = self.columns or list(there)
        if missing := [name for name in names if name not in there]:
            raise FormatError(f"{place} has no {missing}; there are {sorted(there)}")
        return names

    def _decoded(self, data: Any, name: str, place: str) -> object:
        if name == "__key__":
            return data
        with naming(f"{place}, field {name!r}", *BAD_HEADER, ArithmeticError, zlib.error):
            suffix = name.rpartition(".")[2]
            while True:
                decode = self.decoders.get(name) or self.decoders.get(suffix)
                if decode is not None:
                    return decode(data)
                if suffix != "gz" or not self.decoders:
                    return data
                data, name = _unpacked(data), name.removesuffix("gz").removesuffix(".")
                suffix = name.rpartition(".")[2]


def _unpacked(data: bytes) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        unpacked = read_pieces(file.read, MOST_UNPACKED + 1)
    if len(unpacked) > MOST_UNPACKED:
        raise ValueError(
            f"it has more than {MOST_UNPACKED} bytes when unpacked: give a decoder for this field"
        )
    return unpacked


def read_pieces(read: Callable[[int], bytes], size: int, at_once: int = PIECE) -> bytes:
    """Up to `size` bytes, in memory that grows with what there is, as a size may be wrong.

    Args:
        at_once: so many bytes may be there at least.
    """
    if size <= at_once:
        return read(size)
    found = bytearray()
    while len(found) < size and (piece := read(min(size - len(found), max(PIECE, len(found))))):
        found += piece
    return bytes(found)
