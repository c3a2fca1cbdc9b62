"""Tar files in the manner of WebDataset: the files of a sample follow each other, with one key."""

from __future__ import annotations

import gzip
import io
import json
import os
import posixpath
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from ..types import Handle, Parse, Transform
from .common import FormatError, PathLike, naming, open_regular
from .images import decode_image
from .mapped import BAD_HEADER
from .shards import ShardedStream

__all__ = ["BASIC", "TarDataset", "decode_npy"]

TAR_BLOCK = 512  # bytes, as the format calls it
PIECE = 1 << 20  # bytes; how much more memory than there is data a wrong length may ask for
MOST_OF_A_HEADER = 1 << 20  # bytes: of a long name, or of pax records
MOST_UNPACKED = 1 << 30  # bytes of a file in gzip


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


class TarDataset(ShardedStream):
    """Samples of tar files. Each file is read by one worker of one rank, once.

    Files are of one sample if their names agree up to the first dot after the last slash; the rest
    of the name, in lower case, is the field: `000/cat7.seg.PNG` is the field "seg.png" of the
    sample "000/cat7".

    Args:
        paths: a file, a list, or a pattern as "train-{000..041}.tar" or with * and ?; plain, or
            compressed by gzip.
        decoders: functions of a file's bytes, by field or by what follows its last dot. Default
            `BASIC`: cls and the like to int, json, txt to str, images to uint8 tensors
            (3, height, width), npy to tensors. Everything else stays bytes; {} leaves all bytes.
            Where there are decoders but none for a field ".gz", it is unpacked, to 1 GiB at most,
            and decoded as what is before: "json.gz" as json.
        columns: these fields only, which every sample must have; None, the default: all that there
            are, and the sample's name as "__key__".
        transform: called on each sample, a dict.
        **options: as for ShardedStream: shuffle_shards, seed, rank, world_size.

    Raises:
        FormatError: a file is damaged or cut off, or a sample cannot be decoded; names the file,
            the sample and the field.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        decoders: Mapping[str, Parse] = BASIC,
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
        **options: Any,
    ) -> None:
        super().__init__(paths, **options)
        self.decoders = {name.lower(): decode for name, decode in decoders.items()}
        self.columns = None if columns is None else [name.lower() for name in columns]
        self.transform = transform

    def samples(self, path: str, first: int = 0) -> Iterator[Any]:
        for number, sample in islice(enumerate(_grouped(path)), first, None):
            place = f"{path}: sample {number} ({sample['__key__']!r})"
            names = self.columns or list(sample)
            if missing := [name for name in names if name not in sample]:
                raise FormatError(f"{place} has no {missing}; there are {sorted(sample)}")
            decoded = {name: self._decoded(sample[name], name, place) for name in names}
            yield decoded if self.transform is None else self.transform(decoded)

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
        unpacked = _read_pieces(file.read, MOST_UNPACKED + 1)
    if len(unpacked) > MOST_UNPACKED:
        raise ValueError(
            f"it has more than {MOST_UNPACKED} bytes when unpacked: give a decoder for this field"
        )
    return unpacked


def _read_pieces(read: Callable[[int], bytes], size: int, at_once: int = PIECE) -> bytes:
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


def _grouped(path: str) -> Iterator[dict[str, object]]:
    sample: dict[str, object] = {}
    for name, data in _files(path):
        folder, base = posixpath.split(name)
        stem, _, field = base.partition(".")
        key = posixpath.join(folder, stem)
        if sample and sample["__key__"] != key:
            yield sample
            sample = {}
        field = field.lower()
        if field in sample or field == "__key__":
            raise FormatError(f"{path}: sample {key!r} has the field {field!r} twice")
        sample["__key__"] = key
        sample[field] = data
    if sample:
        yield sample


class _Watched:
    """A file that remembers what was read last: tarfile takes a damaged header for the end.

    Args:
        file: the file.
        at_once: as for `_read_pieces`.
    """

    def __init__(self, file: Handle, at_once: int) -> None:
        self.last = b""
        self._file = file
        self._at_once = at_once
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        """As a file does, for headers: their size is bounded, and must not be negative."""
        if not 0 <= size <= MOST_OF_A_HEADER:
            raise ValueError(f"a header has {size} bytes, where {MOST_OF_A_HEADER} are allowed")
        return self.read_content(size)

    def read_content(self, size: int) -> bytes:
        """The bytes of a file in the archive."""
        if size < 0:
            raise ValueError(f"a size in it is {size}")
        self.last = _read_pieces(self._file.read, size, self._at_once)
        return self.last


def _files(path: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the regular files that have a name and a suffix."""
    number = 0
    with open_regular(path) as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        size = os.fstat(raw.fileno()).st_size
        unpacked: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        file: Handle = _Watched(unpacked, PIECE if packed else size)
        with naming(path, tarfile.TarError, zlib.error):
            archive = tarfile.TarFile(fileobj=file)
        with archive:
            while True:
                with naming(f"{path}: file {number}", tarfile.TarError, zlib.error):
                    member = archive.next()
                    if member is None:
                        _check_end(file)
                        break
                    data = _content(file, member)
                archive.members.clear()  # type: ignore[attr-defined] # it remembers all of them
                number += 1
                if data is not None:
                    yield member.name, data


def _content(file: _Watched, member: tarfile.TarInfo) -> bytes | None:
    """The bytes of a regular file with a name and a suffix; None for anything else."""
    if not member.isreg() or posixpath.basename(member.name).find(".") < 1:
        return None
    if member.issparse():
        raise ValueError(f"{member.name!r} is stored as a sparse file")
    file.seek(member.offset_data)
    data = file.read_content(member.size)
    if len(data) != member.size:
        raise ValueError(f"{member.name!r} is cut off")
    return data


def _check_end(file: _Watched) -> None:
    if len(file.last) != TAR_BLOCK or file.last.strip(b"\0"):
        raise ValueError("the archive ends here without its mark of the end, or goes on damaged")
