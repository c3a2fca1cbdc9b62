"""Zip archives: the files of a sample have one key, as in tars, and are read in any order."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ..types import Parse, Transform
from .common import FormatError, PathLike, naming, open_regular
from .fields import BASIC, MOST_UNPACKED, WithFields, key_and_field
from .handles import RangeDataset, located

LOCAL = struct.Struct("<4s22xHH")  # its mark; how long the name and what follows it are
ENCRYPTED = 1
KINDS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def is_zip(head: bytes, size: int) -> bool:
    """True if a file that begins so is a zip archive, but for those that torch.save writes."""
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return head.startswith((b"PK\3\4", b"PK\5\6")) and not name.endswith(b"/data.pkl")


class _Member(NamedTuple):
    """A file of an archive."""

    header: int  # byte where it begins
    packed: int  # bytes
    size: int  # bytes when it is unpacked
    crc: int
    kind: int  # 0 is stored, 8 deflated
    field: int  # number of the name of the field


class ZipDataset(WithFields, RangeDataset):
    """Samples of zip archives by the archives' own index.

    Files are of one sample if their names agree up to the first dot after the last slash, as for
    TarDataset: `cat/7.jpg` and `cat/7.json` are the fields "jpg" and "json" of the sample "cat/7".
    They need not follow each other. Samples are in the order of their first files.

    Args:
        paths: an archive, a list, or a pattern as "train-{000..041}.zip" or with * and ?.
        decoders, columns, transform: as for TarDataset.

    Archives are read, not mapped.

    Raises:
        FormatError: an archive is damaged, or a file in it is encrypted, has more than 1 GiB or
            another compression than deflate; when a sample is read, that a checksum is wrong, that
            it cannot be decoded, or that the archive has changed. Names the archive and the file.
        FileNotFoundError: there is no such archive.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        decoders: Mapping[str, Parse] = BASIC,
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
    ) -> None:
        super().__init__(paths)
        self._set_fields(decoders, columns, transform)
        numbers: dict[str, int] = {}
        keys: list[bytes] = []
        files: list[_Member] = []
        counts: list[int] = []
        for path in self.paths:
            samples = _samples(path, numbers)
            keys += [key.encode("utf-8", "surrogateescape") for key in samples]
            counts += [len(found) for found in samples.values()]
            files += [file for found in samples.values() for file in found]
            self._ends.append(len(keys))
        self._names = [*numbers]
        # in few blocks: workers would copy the pages of a million objects as they count references
        self._files = torch.tensor(files, dtype=torch.int64).reshape(-1, len(_Member._fields))
        self._files_end = torch.tensor([0, *accumulate(counts)], dtype=torch.int64)
        self._keys = b"".join(keys)
        self._keys_end = torch.tensor([0, *accumulate(map(len, keys))], dtype=torch.int64)

    def _read(self, places: Sequence[int]) -> list[object]:
        return [self._sample(place) for place in places]

    def _sample(self, place: int) -> object:
        number, inside = located(self._ends, place)
        start, end = self._keys_end[place : place + 2].tolist()
        key = self._keys[start:end].decode("utf-8", "surrogateescape")
        name = f"{self.paths[number]}: sample {inside} ({key!r})"
        first, last = self._files_end[place : place + 2].tolist()
        files = [_Member(*row) for row in self._files[first:last].tolist()]
        there = {self._names[file.field]: file for file in files}
        sample: dict[str, object] = {}
        for field in self._chosen(["__key__", *there], name):
            if field == "__key__":
                sample[field] = key
            else:
                with naming(f"{name}, field {field!r}", struct.error, zlib.error):
                    data = self._content(number, there[field])
                sample[field] = self._decoded(data, field, name)
        return sample

    def _content(self, number: int, file: _Member) -> bytes:
        mark, name, extra = LOCAL.unpack(self._bytes(number, file.header, LOCAL.size))
        if mark != b"PK\3\4":
            raise ValueError(f"no file begins at byte {file.header}")
        data = self._bytes(number, file.header + LOCAL.size + name + extra, file.packed)
        if file.kind == zipfile.ZIP_DEFLATED:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, file.size + 1)
        if len(data) != file.size or zlib.crc32(data) != file.crc:
            raise ValueError("the length or the checksum is wrong")
        return data


def _samples(path: str, numbers: dict[str, int]) -> dict[str, list[_Member]]:
    """The files of each sample of an archive, by its key; names of fields get numbers."""
    samples: dict[str, list[_Member]] = {}
    bad = zipfile.BadZipFile, NotImplementedError, struct.error, UnicodeError
    with open_regular(path) as raw, naming(path, *bad), zipfile.ZipFile(raw) as archive:
        length = os.fstat(raw.fileno()).st_size
        for info in archive.infolist():
            place = None if info.is_dir() else key_and_field(info.filename)
            if place is None:
                continue
            if info.flag_bits & ENCRYPTED:
                raise FormatError(f"{path}: {info.filename!r} is encrypted")
            if info.compress_type not in KINDS:
                raise FormatError(
                    f"{path}: {info.filename!r} is compressed by method {info.compress_type}; "
                    "only deflate is read"
                )
            data_end = info.header_offset + LOCAL.size + info.compress_size
            if info.header_offset < 0 or data_end > length:
                raise FormatError(f"{path}: {info.filename!r} would not end in it")
            if info.file_size > MOST_UNPACKED:
                raise FormatError(f"{path}: {info.filename!r} has more than {MOST_UNPACKED} bytes")
            key, field = place
            files = samples.setdefault(key, [])
            number = numbers.setdefault(field, len(numbers))
            if field == "__key__" or any(file.field == number for file in files):
                raise FormatError(f"{path}: sample {key!r} has the field {field!r} twice")
            sizes = info.header_offset, info.compress_size, info.file_size
            files.append(_Member(*sizes, info.CRC, info.compress_type, number))
    if not samples:
        raise FormatError(f"{path}: no file with a name and a suffix is in it")
    return samples
