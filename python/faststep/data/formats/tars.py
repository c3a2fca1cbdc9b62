"""Tar files in the manner of WebDataset: the files of a sample follow each other, with one key."""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ..types import Handle, Parse, Transform
from .common import FormatError, PathLike, naming, open_regular
from .fields import BASIC, PIECE, WithFields, key_and_field, read_pieces
from .shards import ShardedStream

TAR_BLOCK = 512  # bytes, as the format calls it
MOST_OF_HEADERS = 1 << 20  # bytes before one file: of long names and pax records


class TarDataset(WithFields, ShardedStream):
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
        self._set_fields(decoders, columns, transform)

    def samples(self, path: str, first: int = 0) -> Iterator[Any]:
        for number, sample in islice(enumerate(_grouped(path)), first, None):
            place = f"{path}: sample {number} ({sample['__key__']!r})"
            names = self._chosen([*sample], place)
            decoded = {name: self._decoded(sample[name], name, place) for name in names}
            yield decoded if self.transform is None else self.transform(decoded)


def _grouped(path: str) -> Iterator[dict[str, object]]:
    sample: dict[str, object] = {}
    for (key, field), data in _files(path):
        if sample and sample["__key__"] != key:
            yield sample
            sample = {}
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
        at_once: as for `read_pieces`.
    """

    def __init__(self, file: Handle, at_once: int) -> None:
        self.last = b""
        self.headers = 0  # bytes that were read of them since this was set
        self._file = file
        self._at_once = at_once
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        """As a file does, for headers: their size is bounded, and must not be negative."""
        self.headers += size
        if size < 0 or self.headers > MOST_OF_HEADERS:
            raise ValueError(f"a header has {size} bytes; {MOST_OF_HEADERS} are allowed for a file")
        return self.read_content(size)

    def read_content(self, size: int) -> bytes:
        """The bytes of a file in the archive."""
        if size < 0:
            raise ValueError(f"a size in it is {size}")
        self.last = read_pieces(self._file.read, size, self._at_once)
        return self.last


def _files(path: str) -> Iterator[tuple[tuple[str, str], bytes]]:
    """Keys, fields and contents of the regular files that have a name and a suffix."""
    number = 0
    with open_regular(path) as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        size = os.fstat(raw.fileno()).st_size
        unpacked: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        file: Handle = _Watched(unpacked, PIECE if packed else size)
        with naming(path, tarfile.TarError, zlib.error, RecursionError):
            archive = tarfile.TarFile(fileobj=file)
        with archive:
            while True:
                bad = tarfile.TarError, zlib.error, RecursionError
                with naming(f"{path}: file {number}", *bad):
                    member = archive.next()
                    if member is None:
                        _check_end(file)
                        break
                    data = _content(file, member)
                    file.headers = sum(map(len, archive.pax_headers.values()))  # global ones
                archive.members.clear()  # type: ignore[attr-defined] # it remembers all of them
                number += 1
                if data is not None:
                    yield data


def _content(file: _Watched, member: tarfile.TarInfo) -> tuple[tuple[str, str], bytes] | None:
    """The entry of `_files` for a regular file with a name and a suffix; None for all others."""
    place = key_and_field(member.name) if member.isreg() else None
    if place is None:
        return None
    if member.issparse():
        raise ValueError(f"{member.name!r} is stored as a sparse file")
    file.seek(member.offset_data)
    data = file.read_content(member.size)
    if len(data) != member.size:
        raise ValueError(f"{member.name!r} is cut off")
    return place, data


def _check_end(file: _Watched) -> None:
    if len(file.last) != TAR_BLOCK or file.last.strip(b"\0"):
        raise ValueError("the archive ends here without its mark of the end, or goes on damaged")
