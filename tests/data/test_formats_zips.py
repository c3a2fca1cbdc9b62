"""Zip archives: samples by key in any order, damaged, and hostile."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import faststep.data
from faststep.data import DataLoader, FormatError, convert
from faststep.data.formats import ZipDataset, decode_image, zips

PACKED = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]


def write(path: Path, files: dict[str, bytes], packed: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", packed) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def png(value: int) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", (3, 2), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("packed", PACKED)
def test_samples_come_back(tmp_path: Path, packed: int) -> None:
    files = {
        "cat/": b"",
        "__MACOSX/cat/._1.png": b"x",
        "README": b"no suffix",
        "cat/1.png": png(1),
        "cat/2.PNG": png(2),
        "grün/3.png": png(3),
        "cat/2.json": json.dumps({"a": [1, None]}).encode(),
        "cat/1.json": b"{}",
        "grün/3.json": b"3",
        "grün/3.seg.raw": b"",
    }
    dataset: Any = faststep.data.open(write(tmp_path / "x", files, packed))
    assert type(dataset) is ZipDataset
    for copy in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert [copy[i]["__key__"] for i in range(len(copy))] == ["cat/1", "cat/2", "grün/3"]
        assert [int(copy[i]["png"][0, 0, 0]) for i in range(3)] == [1, 2, 3]
        assert [copy[i]["json"] for i in (0, 1, -1)] == [{}, {"a": [1, None]}, 3]
        assert copy[2]["seg.raw"] == b""
    plain = ZipDataset(tmp_path / "x", decoders={}, columns=["json"], transform=lambda s: s["json"])
    assert plain[0] == b"{}"
    wanting: Any = faststep.data.open(tmp_path / "x", columns=["seg.raw"])
    with pytest.raises(FormatError, match=r"sample 0 \('cat/1'\) has no \['seg\.raw'\]"):
        wanting[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_read_shards(tmp_path: Path, workers: int) -> None:
    for shard in range(30):
        write(
            tmp_path / f"{shard:02}.zip", {f"{i}.cls": b"%d" % (10 * shard + i) for i in range(10)}
        )
    dataset = faststep.data.open(tmp_path / "{00..29}.zip", columns=["cls"])
    loader = DataLoader(dataset, 7, shuffle=True, num_workers=workers)
    for _ in range(2):
        assert sorted(n for b in loader for n in b["cls"].tolist()) == [*range(300)]
    assert convert(tmp_path / "03.zip", tmp_path / "out", columns=["cls"]) == 10
    assert faststep.data.open(tmp_path / "out")[1] == {"cls": torch.tensor(31)}


def test_an_array_in_front_is_an_npz_and_a_model_is_neither(tmp_path: Path) -> None:
    np.savez(tmp_path / "x", a=np.arange(3))
    with pytest.raises(FormatError, match="npz"):
        faststep.data.open(tmp_path / "x.npz")
    array = io.BytesIO()
    np.save(array, np.arange(3))
    write(tmp_path / "y", {"s.npy": array.getvalue(), "s.cls": b"1"})
    assert ZipDataset(tmp_path / "y")[0]["npy"].tolist() == [0, 1, 2]
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(FormatError, match="is none of"):
        faststep.data.open(tmp_path / "model.pt")


@pytest.mark.parametrize("packed", PACKED)
def test_damage_anywhere(tmp_path: Path, packed: int) -> None:
    want = [b"abc" * 30, b"0123456789" * 9, b""]
    whole = write(tmp_path / "x", {f"{i}.raw": data for i, data in enumerate(want)}, packed)
    data, generator, refused = whole.read_bytes(), random.Random(5), 0
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << generator.randrange(8)
        (tmp_path / "bad").write_bytes(damaged)
        try:
            dataset = ZipDataset(tmp_path / "bad")
            for sample in map(dataset.__getitem__, range(len(dataset))):
                del sample["__key__"]  # names have no checksum, what they stand for has
                assert {*sample.values()} <= {*want}
        except FormatError as error:
            assert str(tmp_path / "bad") in str(error)  # noqa: PT017
            refused += 1
    assert refused > len(data) / 3
    for length in range(1, len(data), 7):
        (tmp_path / "bad").write_bytes(data[:length])
        with pytest.raises(FormatError, match="bad"):
            ZipDataset(tmp_path / "bad")


def patched(path: Path, fields: dict[int, bytes]) -> Path:
    """Changes the entry of the first file in the archive's index."""
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\1\2")
    for offset, value in fields.items():
        data[at + offset : at + offset + len(value)] = value
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({8: b"\1"}, "encrypted"),
        ({10: b"\x0c\0"}, "compressed by method 12"),
        ({20: struct.pack("<I", 0x7FFFFFFF)}, "would not end in it"),
        ({24: struct.pack("<I", 0x7FFFFFFF)}, "more than 1073741824 bytes"),
        ({24: struct.pack("<I", 1 << 29)}, "field 'raw': the length or the checksum is wrong"),
        ({24: struct.pack("<I", 100)}, "field 'raw': the length or the checksum is wrong"),
        ({16: b"1234"}, "field 'raw': the length or the checksum is wrong"),
        ({42: b"\7"}, "field 'raw': no file begins at byte 7"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, fields: dict[int, bytes], message: str) -> None:
    path = patched(write(tmp_path / "x", {"a.raw": bytes(100000)}), fields)
    with pytest.raises(FormatError, match=rf"/x: .*{message}"):
        ZipDataset(path)[0]


def test_archives_without_samples(tmp_path: Path) -> None:
    for files in ({}, {"dir/": b"", "LICENSE": b"x"}):
        with pytest.raises(FormatError, match="no file with a name and a suffix is in it"):
            faststep.data.open(write(tmp_path / "x", files))
    write(tmp_path / "x", {"a.txt": b"1", "A.txt": b"2"})
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes().replace(b"A", b"a"))
    with pytest.raises(FormatError, match="sample 'a' has the field 'txt' twice"):
        ZipDataset(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        ZipDataset(tmp_path / "none.zip")


def test_an_image_of_too_many_pixels(tmp_path: Path) -> None:
    data = png(1)
    write(tmp_path / "x", {"a.png": data[:16] + struct.pack(">II", 30000, 30000) + data[24:]})
    with pytest.raises(FormatError, match=r"/x: sample 0 \('a'\), field 'png': "):
        ZipDataset(tmp_path / "x")[0]
    assert zips.BASIC["png"] is decode_image


def test_names_that_no_unicode_has(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"aé.txt": b"1"})
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xfe"))
    with pytest.raises(FormatError, match="/x: "):
        ZipDataset(path)
