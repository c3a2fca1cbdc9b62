"""TFRecord files, by index or as a stream. All checksums are verified."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from ... import _C
from ..types import Parse, State
from .common import FormatError, PathLike, naming, open_regular, position
from .example import parse_example
from .mapped import map_array
from .shards import ShardedStream, shard_names

HEAD = 12  # bytes of a length and its checksum, before the data
AT_ONCE = 4096  # records that one call finds
FAULTS = {
    1: "the file ends in the record's length",
    2: "the checksum of the record's length is wrong",
    3: "the file ends in the record's data",
    4: "the checksum of the record's data is wrong",
}


def begins_a_record(head: bytes) -> bool:
    """True if a file that begins so is a TFRecord file: by the checksum of the first length."""
    if len(head) < HEAD:
        return False
    crc = _C.crc32c(head[:8])
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return masked == int.from_bytes(head[8:12], "little")


class _RecordFile:
    """A mapped file."""

    def __init__(self, path: str) -> None:
        import numpy

        self.path = path
        with open_regular(path) as file:
            self.size = os.fstat(file.fileno()).st_size
        with naming(path):
            self.items = map_array(path, numpy.uint8, (self.size,))
        self.address = self.items.ctypes.data

    def scan(self, at: int, number: int, check: bool, places: torch.Tensor) -> tuple[int, int]:
        """Fills `places` from the record `number` on, at byte `at`; (how many, next byte)."""
        found, end, fault = _C.scan_tfrecords(self.address, self.size, at, check, places)
        if fault:
            raise FormatError(
                f"{self.path}: record {number + found}, at byte {end}: {FAULTS[fault]}"
            )
        return found, end

    def data(self, start: int, length: int) -> bytes:
        return bytes(self.items[start : start + length].data)

    def parsed(self, number: int, start: int, length: int, parse: Parse) -> object:
        with naming(f"{self.path}: record {number}, at byte {start - HEAD}"):
            return parse(self.data(start, length))


class TFRecordDataset(Dataset[Any]):
    """Records of TFRecord files by their index, which is built in one pass over all lengths.

    Args:
        paths: a file, a list, or a pattern as "train-{000..041}" or with * and ?.
        parse: makes a sample of a record's bytes. Default `parse_example`, which reads
            tf.train.Example to a dict of tensors and bytes, and SequenceExample with a list of
            these, one for each step, for each feature list; `bytes` leaves them as they are.

    Files are mapped. The checksums of lengths are looked at when the index is built, those of data
    when a record is read.

    Raises:
        FormatError: a record is damaged; names the file, the record and the byte where it begins.
    """

    def __init__(self, paths: PathLike | Sequence[PathLike], parse: Parse = parse_example) -> None:
        self.paths = shard_names(paths)
        self.parse = parse
        self._map()
        self.places = [_index(file) for file in self._files]
        self.ends = torch.tensor([len(p) // 2 for p in self.places]).cumsum(0)

    def _map(self) -> None:
        self._files = [_RecordFile(path) for path in self.paths]

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: int) -> Any:
        at = position(index, len(self), ", ".join(self.paths[:3]))
        shard = int(torch.searchsorted(self.ends, at, right=True))
        number = at - (int(self.ends[shard - 1]) if shard else 0)
        file, places = self._files[shard], self.places[shard]
        start, length = places[2 * number : 2 * number + 2].tolist()
        now = torch.zeros(2, dtype=torch.int64)
        found, _ = file.scan(start - HEAD, number, True, now)
        if not found or now.tolist() != [start, length]:
            raise FormatError(
                f"{file.path}: record {number}, at byte {start - HEAD}, is not what it was when "
                "the file was indexed"
            )
        return file.parsed(number, start, length, self.parse)

    def __getstate__(self) -> State:
        return {k: v for k, v in vars(self).items() if k != "_files"}

    def __setstate__(self, state: State) -> None:
        vars(self).update(state)
        self._map()


def _index(file: _RecordFile) -> torch.Tensor:
    """Start and length of each record's data."""
    parts, at, number = [torch.empty(0, dtype=torch.int64)], 0, 0
    while at < file.size:
        places = torch.empty(2 * AT_ONCE, dtype=torch.int64)
        found, at = file.scan(at, number, False, places)
        parts.append(places[: 2 * found])
        number += found
    return torch.cat(parts)


class TFRecordStream(ShardedStream):
    """Records of TFRecord files, one after another, without an index.

    Args:
        paths: as for TFRecordDataset. Each file is read by one worker of one rank.
        parse: as for TFRecordDataset.
        **options: as for ShardedStream: shuffle_shards, seed, rank, world_size.

    Raises:
        FormatError: a record is damaged; names the file, the record and the byte where it begins.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        parse: Parse = parse_example,
        **options: Any,
    ) -> None:
        super().__init__(paths, **options)
        self.parse = parse

    def samples(self, path: str, first: int = 0) -> Iterator[Any]:
        file, at, number = _RecordFile(path), 0, 0
        place = torch.empty(2, dtype=torch.int64)
        while at < file.size:
            _, at = file.scan(at, number, number >= first, place)
            if number >= first:
                start, length = place.tolist()
                yield file.parsed(number, start, length, self.parse)
            number += 1
