"""What no file of a dataset should be: each a clear error at once."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import faststep.data
from faststep.cli import main
from faststep.data import ArrayDataset, FormatError, TokenDataset, convert, transforms
from faststep.data.formats import (
    ArrowDataset,
    HDF5Dataset,
    ImageFolder,
    JsonLinesDataset,
    JsonLinesStream,
    LMDBDataset,
    ParquetDataset,
    TarDataset,
    TFRecordDataset,
    TFRecordStream,
    ZipDataset,
    decode_image,
    mapped,
)

from . import test_formats_archives
from .shapes import Mapped


@pytest.fixture(autouse=True)
def _at_once() -> Iterator[None]:
    """An alarm for whatever waits without end."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 60)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


OPENERS = {
    "open": faststep.data.open,
    "list": lambda path: faststep.data.open([path, path]),
    "convert": lambda path: convert(path, path.parent / "out"),
    "tar": lambda path: list(TarDataset(path)),
    "tfrecord": TFRecordDataset,
    "stream": lambda path: list(TFRecordStream(path)),
    "json": JsonLinesDataset,
    "json stream": lambda path: list(JsonLinesStream(path)),
    "zip": ZipDataset,
    "hdf5": HDF5Dataset,
    "parquet": ParquetDataset,
    "arrow": ArrowDataset,
    "lmdb": LMDBDataset,
    "npy": mapped.open_npy,
    "npz": lambda path: mapped.open_npz(path, read=True),
    "safetensors": mapped.open_safetensors,
}


@pytest.mark.parametrize("kind", OPENERS)
def test_a_pipe_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(FormatError, match="x is not a file, but a pipe, a socket or a device"):
        OPENERS[kind](tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]
    with pytest.raises(FormatError, match="null is not a file"):
        OPENERS[kind](Path("/dev/null"))


def test_pipes_in_directories(tmp_path: Path) -> None:
    convert(ArrayDataset(torch.arange(3)), tmp_path / "out")
    (tmp_path / "out" / "data.npy").unlink()
    os.mkfifo(tmp_path / "out" / "data.npy")
    with pytest.raises(FormatError, match=r"data\.npy is not a file"):
        faststep.data.open(tmp_path / "out")
    (tmp_path / "out" / "faststep.json").unlink()
    os.mkfifo(tmp_path / "out" / "faststep.json")
    with pytest.raises(FormatError, match=r"faststep\.json is not a file"):
        faststep.data.open(tmp_path / "out")
    (tmp_path / "lmdb").mkdir()
    os.mkfifo(tmp_path / "lmdb" / "data.mdb")
    with pytest.raises(FormatError, match=r"data\.mdb is not a file"):
        faststep.data.open(tmp_path / "lmdb")
    (tmp_path / "images" / "cat").mkdir(parents=True)
    os.mkfifo(tmp_path / "images" / "cat" / "x.jpg")
    with pytest.raises(FormatError, match=r"x\.jpg is not a file"):
        ImageFolder(tmp_path / "images")[0]
    os.mkfifo(tmp_path / "tokens.npy")
    with pytest.raises(FormatError, match=r"tokens\.npy is not a file"):
        TokenDataset(tmp_path / "tokens.npy", 4)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("x-{0..99999999999}.tar", "more than 1000000 files"),
        (f"x-{{0..{'9' * 5000}}}.tar", "more than 1000000 files"),
        ("x-{0..999}-{0..999}-{0..999}.tar", "more than 1000000 files"),
        ("x-{5..3}.tar", r"\{5\.\.3\} stands for no file"),
        ("x-{0..3}-{5..3}.tar", r"\{5\.\.3\} stands for no file"),
    ],
)
@pytest.mark.parametrize("opener", [faststep.data.open, TarDataset, TFRecordStream, ParquetDataset])
def test_ranges_without_end(tmp_path: Path, opener: Any, pattern: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        opener(tmp_path / pattern)
    if opener is not faststep.data.open:  # which takes no patterns in a list
        with pytest.raises(FormatError, match=message):
            opener([tmp_path / pattern])


def test_a_range_of_a_million_is_no_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"x-000000\.tar"):
        faststep.data.open(tmp_path / "x-{000000..000999}.tar")


FIELD = {"name": "x", "kind": "rows", "file": "data.npy", "dtype": None}
RIGHT = {"format": "faststep arrays", "version": 1, "length": 1, "sample": None, "fields": [FIELD]}
DEEP = '{"kind": "list", "keys": [], "children": [' * 50_000 + "null" + "]}" * 50_000


def field(**changed: Any) -> dict[str, Any]:
    return {"fields": [{**FIELD, **changed}]}


def sample(kind: str, *keys: Any) -> dict[str, Any]:
    children = [None] * max(1, len(keys))
    containers = {"kind": kind, "keys": list(keys), "children": children}
    return {"sample": containers, "fields": [FIELD] * len(children)}


BAD_MANIFESTS = {
    "deep": json.dumps({**RIGHT, "sample": 0}).replace('"sample": 0', f'"sample": {DEEP}'),
    "deep noise": "[" * 200_000,
    "empty": "",
    "list": "[]",
    "cut": '{"format":',
    **{
        name: json.dumps({**RIGHT, **changed})
        for name, changed in {
            "format": {"format": "another"},
            "version": {"version": 99},
            "length": {"length": -1},
            "another length": {"length": 4},
            "float": {"length": 1.0},
            "long": {"length": 10**30},
            "text": {"length": "1"},
            "no fields": {"fields": []},
            "fields": {"fields": "data.npy"},
            "outside": field(file="../data.npy"),
            "absolute": field(file="/etc/passwd"),
            "null": field(file="data.npy\0"),
            "type": field(dtype="nn"),
            "no type": field(dtype="Tensor"),
            "wide": field(dtype="complex128"),
            "kind": field(kind=["rows"]),
            "other kind": field(kind="other"),
            "keys": sample("dict", "a", "a"),
            "key": sample("dict", []),
            "container": sample("set"),
        }.items()
    },
}


@pytest.mark.parametrize("kind", BAD_MANIFESTS)
def test_manifests(tmp_path: Path, kind: str) -> None:
    convert(ArrayDataset(torch.arange(1, dtype=torch.int32)), tmp_path / "out")
    (tmp_path / "out" / "faststep.json").write_text(BAD_MANIFESTS[kind])
    with pytest.raises(FormatError, match=r"out/faststep\.json: ."):
        faststep.data.open(tmp_path / "out")


@pytest.mark.parametrize("header", ["(" * 9000, "-" * 9000 + "1", "[" * 180 + "]" * 180])
def test_headers_of_arrays_that_are_no_headers(tmp_path: Path, header: str) -> None:
    size = len(header).to_bytes(2, "little")
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + size + header.encode())
    with pytest.raises(FormatError, match=r"x\.npy: ."):
        faststep.data.open(tmp_path / "x.npy")


@pytest.mark.parametrize("shape", [(3, 0, 5), (3, 5, 0), (3, 0, 0)])
def test_images_without_pixels(tmp_path: Path, shape: tuple[int, ...]) -> None:
    image = torch.zeros(shape, dtype=torch.uint8)
    size = f"{shape[1]} by {shape[2]}"
    with pytest.raises(FormatError, match=f"list: record 0: an image of {size} pixels cannot"):
        convert([image], tmp_path / "out", image_size=4)
    assert not os.listdir(tmp_path)
    for transform in (transforms.Resize(4), transforms.RandomResizedCrop(4)):
        name = type(transform).__name__
        with pytest.raises(ValueError, match=f"{name}: the images have no pixels, they are {size}"):
            transforms.Compose([transform])(image[None])
    for data in (b"P6 5 0 255\n", b"P6 0 5 255\n", b""):
        with pytest.raises((ValueError, OSError)):
            decode_image(data)


def test_a_size_for_data_without_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read: list[int] = []

    def made(index: int) -> Any:
        read.append(index)
        return {"x": torch.ones(3, 4, 4), "y": index}

    with pytest.raises(FormatError, match=r"record 0: image_size is for .*\(float32 \(3, 4, 4\)\)"):
        convert(Mapped(made, 200), tmp_path / "out", image_size=4)
    assert read == [0]
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    assert main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "out"), "--image-size=4"])
    assert "x.npy: record 0: image_size is for images" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["x.npy"]


def test_columns_of_npz(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.arange(3), b=np.arange(6).reshape(3, 2), other=np.arange(5))
    with pytest.raises(FormatError, match="'other' has 5 rows, 'a' has 3: choose fields"):
        faststep.data.open(path, read=True)
    dataset: Any = faststep.data.open(path, read=True, columns=["b", "a"])
    assert {name: value.tolist() for name, value in dataset[1].items()} == {"b": [2, 3], "a": 1}
    with pytest.raises(FormatError, match=r"there is no array 'c' among \['a', 'b', 'other'\]"):
        faststep.data.open(path, read=True, columns=["c"])
    assert main(["convert", str(path), str(tmp_path / "out"), "--columns", "a,b"]) == 0
    assert main(["convert", str(path), str(tmp_path / "no"), "--columns", "a,c"]) != 0
    assert "there is no array 'c'" in capsys.readouterr().err
    assert len(faststep.data.open(tmp_path / "out")) == 3  # type: ignore[arg-type]


def test_options_that_a_format_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    tar = test_formats_archives.write(tmp_path / "x.tar", {"a.cls": b"1"})
    convert(ArrayDataset(torch.arange(3)), tmp_path / "out")
    for path, message in (
        (tmp_path / "x.npy", r"x\.npy: npy has no option columns; it has none"),
        ([tmp_path / "x.npy"] * 2, r"x\.npy: npy has no option columns; it has none"),
        (tmp_path / "out", "out: a converted directory has no option columns"),
    ):
        with pytest.raises(TypeError, match=message):
            faststep.data.open(path, columns=["x"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tar has no option colums; there are columns, decoders, "):
        faststep.data.open(tar, colums=["cls"])
    assert len([*faststep.data.open(tar, columns=["cls"], shuffle_shards=True, seed=3)]) == 1
    assert main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "no"), "--columns", "a"])
    assert "npy has no option columns" in capsys.readouterr().err
