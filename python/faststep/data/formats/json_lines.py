"""JSON lines: one object on each line, by index or as a stream."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, BinaryIO

import torch

from ..types import Transform
from .common import FormatError, PathLike, naming, open_regular
from .handles import RangeDataset, located
from .shards import ShardedStream

BEGIN = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{[ \t]*(?:\}|"(?:[^"\\\n]|\\.)*")')
MOST_OF_A_LINE = 1 << 30  # bytes
GZIP = b"\x1f\x8b"


def begins_json_lines(head: bytes, size: int) -> bool:
    """True if a file that begins so has JSON lines: its first line is an object, or begins one."""
    found = BEGIN.match(head)
    if found is None:
        return False
    line, end, _ = head[found.start() :].lstrip().partition(b"\n")
    if not end and len(head) < size:
        return True
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parsed(line: bytes, columns: Sequence[str] | None, place: str) -> dict[str, object]:
    with naming(place, RecursionError):
        sample = json.loads(str(line, "utf-8-sig"))
        if not isinstance(sample, dict):
            raise ValueError(f"this is no JSON object: {line[:60]!r}")
        if columns is None:
            return sample
        if missing := [name for name in columns if name not in sample]:
            raise ValueError(f"there is no {missing} among {sorted(sample)}")
        return {name: sample[name] for name in columns}


def _lines(file: BinaryIO, path: str) -> Iterator[bytes]:
    """All lines, the empty ones too."""
    while line := file.readline(MOST_OF_A_LINE + 1):
        if len(line) > MOST_OF_A_LINE:
            raise FormatError(f"{path}: a line has more than {MOST_OF_A_LINE} bytes")
        yield line


class JsonLinesDataset(RangeDataset):
    """Objects of JSON lines by an index of the lines, which is made in one pass over the files.

    Args:
        paths: a file, a list, or a pattern as "train-{000..041}.jsonl" or with * and ?; not
            compressed.
        columns: these keys only, which every object must have; None, the default: all.
        transform: called on each sample.

    A sample is the dict that `json.loads` makes of a line. Empty lines are left out. Files are
    read, not mapped.

    Raises:
        FormatError: when a sample is read, that it is no object, or that its file has changed;
            names the file, the sample and the byte where it begins.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
    ) -> None:
        super().__init__(paths, transform)
        self.columns = columns
        places = [_index(path) for path in self.paths]
        self._ends = [*accumulate(map(len, places))]
        self._places = torch.cat(places)

    def _read(self, places: Sequence[int]) -> list[object]:
        samples: list[object] = []
        for place, (start, length) in zip(places, self._places[[*places]].tolist(), strict=True):
            number, inside = located(self._ends, place)
            line = self._bytes(number, start, length)
            name = f"{self.paths[number]}: record {inside}, at byte {start}"
            samples.append(_parsed(line, self.columns, name))
        return samples


def _index(path: str) -> torch.Tensor:
    """Start and length of each line that is not empty."""
    places, at = array("q"), 0
    with open_regular(path) as file:
        if file.peek(2).startswith(GZIP):  # type: ignore[attr-defined]
            raise FormatError(f"{path} is in gzip: JsonLinesStream reads it")
        for line in _lines(file, path):
            if not line.isspace():
                places.extend((at, len(line)))
            at += len(line)
    return torch.tensor(places, dtype=torch.int64).reshape(-1, 2)


class JsonLinesStream(ShardedStream):
    """Objects of JSON lines, one after another, without an index; files may be in gzip.

    Args:
        paths: as for JsonLinesDataset. Each file is read by one worker of one rank.
        columns: as for JsonLinesDataset.
        transform: as for JsonLinesDataset.
        **options: as for ShardedStream: shuffle_shards, seed, rank, world_size.

    Raises:
        FormatError: a line is no object, or the file is damaged; names the file and the sample.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
        **options: Any,
    ) -> None:
        super().__init__(paths, **options)
        self.columns = columns
        self.transform = transform

    def samples(self, path: str, first: int = 0) -> Iterator[Any]:
        number = 0
        with open_regular(path) as raw:
            packed = raw.peek(2).startswith(GZIP)  # type: ignore[attr-defined]
            lines = _lines(gzip.GzipFile(fileobj=raw) if packed else raw, path)  # type: ignore[arg-type]
            while True:
                with naming(f"{path}: record {number}", zlib.error):
                    line = next(lines, None)
                if line is None:
                    return
                if line.isspace():
                    continue
                if number >= first:
                    sample = _parsed(line, self.columns, f"{path}: record {number}")
                    yield sample if self.transform is None else self.transform(sample)
                number += 1
