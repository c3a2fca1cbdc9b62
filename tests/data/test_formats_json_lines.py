"""JSON lines: by index and as a stream, damaged, and changed meanwhile."""

import gzip
import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import faststep.data
from faststep.data import DataLoader, FormatError, convert
from faststep.data.formats import JsonLinesDataset, JsonLinesStream

SAMPLES = [{"text": "grün\n" * (i % 3), "n": i, "list": [i, None, {"a": 1.5}]} for i in range(50)]


def lines(samples: list[Any] = SAMPLES) -> bytes:
    return b"".join(json.dumps(sample).encode() + b"\n" for sample in samples)


@pytest.mark.parametrize(
    "data",
    [
        lines(),
        lines()[:-1],
        b"\xef\xbb\xbf" + lines(),
        lines().replace(b"\n", b"\r\n"),
        b"\n \r\n" + lines().replace(b"\n", b"\n\n  \t\n"),
        b"".join(json.dumps(s, ensure_ascii=False).encode() + b"\n" for s in SAMPLES),
    ],
)
def test_objects_come_back(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    dataset: Any = faststep.data.open(tmp_path / "x")
    assert type(dataset) is JsonLinesDataset
    assert [dataset[i] for i in range(50)] == SAMPLES == [*JsonLinesStream(tmp_path / "x")]
    assert pickle.loads(pickle.dumps(dataset))[-1] == SAMPLES[-1]
    (tmp_path / "x").write_bytes(gzip.compress(data))
    stream = faststep.data.open(tmp_path / "x")
    assert type(stream) is JsonLinesStream
    assert [*stream] == SAMPLES


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_read_shards(tmp_path: Path, workers: int) -> None:
    for i in range(40):
        (tmp_path / f"{i:02}.jsonl").write_bytes(lines([{"n": i, "s": "a"}, {"n": 100 + i}]))
        with gzip.open(tmp_path / f"{i:02}.jsonl.gz", "wb") as file:
            file.write(lines([{"n": i, "s": "a"}, {"n": 100 + i}]))
    want = sorted([*range(40), *range(100, 140)])
    dataset = faststep.data.open(tmp_path / "{00..39}.jsonl", columns=["n"])
    loader = DataLoader(dataset, 7, shuffle=True, num_workers=workers)
    for _ in range(2):
        assert sorted(n for batch in loader for n in batch["n"].tolist()) == want
    stream: Any = faststep.data.open(
        tmp_path / "*.gz", columns=["n"], transform=lambda s: s["n"], shuffle_shards=True
    )
    batches = DataLoader(stream, 7, num_workers=workers)
    assert sorted(n for batch in batches for n in batch.tolist()) == want
    parts = [
        [*JsonLinesStream(stream.paths, rank=rank, world_size=3, transform=lambda s: s["n"])]
        for rank in range(3)
    ]
    assert sorted(n for part in parts for n in part) == want
    first = iter(JsonLinesStream(stream.paths))
    read = [next(first) for _ in range(3)]
    again: Any = iter(JsonLinesStream(stream.paths))
    again.load_state_dict(first.state_dict())  # type: ignore[attr-defined]
    assert [*read, *again] == [*JsonLinesStream(stream.paths)]


def test_a_folder_and_a_conversion(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "README.md").write_text("what it is")
    (tmp_path / "in" / "x.jsonl").write_bytes(lines([{"n": i, "s": "a" * i} for i in range(9)]))
    assert convert(tmp_path / "in", tmp_path / "out") == 9
    assert faststep.data.open(tmp_path / "out")[4] == {"n": torch.tensor(4), "s": "aaaa"}


@pytest.mark.parametrize(
    "line", [b"[1]", b"3", b'{"a": ', b'{"a": 1} 2', b'{"a": "\xff"}', b"[" * 99999]
)
def test_a_line_that_is_no_object(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "x").write_bytes(b'{"a": 1}\n\n' + line + b"\n")
    dataset: Any = faststep.data.open(tmp_path / "x")
    assert (len(dataset), dataset[0]) == (2, {"a": 1})
    with pytest.raises(FormatError, match=r"/x: record 1, at byte 10: "):
        dataset[1]
    with pytest.raises(FormatError, match=r"/x: record 1: "):
        [*JsonLinesStream(tmp_path / "x")]


@pytest.mark.parametrize(
    "data",
    [
        b"{\n  1: 2\n}\n",
        b'{\n  "a": 1\n}\n',
        b'[{"a": 1}]\n',
        b'{"a": 1',
        b"{}}",
        b"{a: 1}",
        b"\n\n",
    ],
)
def test_what_is_no_json_lines(tmp_path: Path, data: bytes) -> None:
    for content in (data, gzip.compress(data)):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(FormatError, match=r"is none of .*JSON lines"):
            faststep.data.open(tmp_path / "x")


def test_long_lines(tmp_path: Path) -> None:
    samples = [{'a\\"b': "x" * 50000}, {'a\\"b': ""}]
    for data in (lines(samples), gzip.compress(lines(samples))):
        (tmp_path / "x").write_bytes(data)
        dataset: Any = faststep.data.open(tmp_path / "x")
        assert [*dataset] == samples


def test_keys_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(lines([{"a": 1, "b": 2}, {"a": 3}]))
    dataset = JsonLinesDataset(tmp_path / "x", columns=["b"])
    assert dataset[0] == {"b": 2}
    with pytest.raises(
        FormatError, match=r"record 1, at byte 17: there is no \['b'\] among \['a'\]"
    ):
        dataset[1]
    with pytest.raises(IndexError, match="no record 2 among 2"):
        dataset[2]


@pytest.mark.parametrize("change", ["cut", "rewritten", "replaced"])
def test_a_file_that_changes(tmp_path: Path, change: str) -> None:
    for i in range(20):
        (tmp_path / f"{i:02}").write_bytes(lines())
    dataset: Any = faststep.data.open([tmp_path / f"{i:02}" for i in range(20)])
    assert dataset[0] == dataset[999 - 49] == SAMPLES[0]
    time.sleep(0.02)
    if change == "cut":
        os.truncate(tmp_path / "00", 100)
    elif change == "rewritten":
        (tmp_path / "00").write_bytes(lines()[::-1])
    else:
        (tmp_path / "new").write_bytes(lines([*reversed(SAMPLES)]))
        os.replace(tmp_path / "new", tmp_path / "00")
        dataset.close()
    with pytest.raises(FormatError, match="/00: the file is not what it was"):
        dataset[1]


def test_gzip_needs_the_stream(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(gzip.compress(lines()))
    with pytest.raises(FormatError, match=r"is in gzip: JsonLinesStream reads it"):
        JsonLinesDataset(tmp_path / "x")
    (tmp_path / "x").write_bytes(gzip.compress(lines())[:-9])
    with pytest.raises(FormatError, match="/x: record "):
        [*JsonLinesStream(tmp_path / "x")]
