"""Many shards under few descriptors, images that claim too much, files that change, odd paths."""

import gzip
import io
import json
import os
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import faststep.data as fs
from faststep.data import formats
from faststep.data.formats import images
from faststep.data.formats.common import FormatError, walked
from faststep.data.formats.jpeg import DECODERS, decoder_name
from programs import Programs

# Makes shards, and reads all of them in order and shuffled, with descriptors for a part of them.
SHARDS = f"""
import pathlib, resource, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
"""
SHARDS += """
import numpy as np
import torch
import faststep.data as fs
from tests.data.written import FIELDS, WRITERS
kind, folder, many, few = sys.argv[1], sys.argv[2], 300, 128
names = [f"{folder}/{i:05}" for i in range(many)]
for i, name in enumerate(names):
    if kind == "tokens":
        np.full(5, i, np.uint16).tofile(name)
    else:
        WRITERS[kind](pathlib.Path(name), np.full((1 + (kind != "tfrecord"), 2), i))
resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
chosen = {"columns": [FIELDS[kind]]} if kind in ("tar", "zip") else {}
dataset = fs.TokenDataset(names, 4) if kind == "tokens" else fs.open(names, **chosen)
def number(batch):
    while not torch.is_tensor(batch):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return batch.reshape(len(batch), -1)[:, 0].tolist()
for shuffle, workers in ((False, 0), (True, 0), (True, 2)):
    if kind == "tar":
        shuffle = None
    loader = fs.DataLoader(dataset, batch_size=100, shuffle=shuffle, num_workers=workers)
    found = [n for batch in loader for n in number(batch)]
    assert sorted(set(found)) == list(range(many)), (kind, shuffle, len(found))
print("read")
"""


@pytest.mark.parametrize(
    "kind",
    [
        "npy",
        "tokens",
        "tfrecord",
        "parquet",
        "texts",
        "chunks",
        "safetensors",
        "json",
        "zip",
        "tar",
    ],
)
def test_many_shards_under_few_descriptors(kind: str, tmp_path: Path, programs: Programs) -> None:
    done = programs.run(SHARDS, kind, str(tmp_path))
    assert done.stdout == "read\n", done.stderr


def jpeg_that_claims(height: int, width: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    data = file.getvalue()
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def png_of(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def png_that_claims(height: int, width: int) -> bytes:
    """In its header, which has a sum of its own: a PNG of a few bytes."""
    data = png_of(1, 1)
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return data[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[33:]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("min_size", [None, 64])
def test_an_image_that_claims_too_many_pixels(decoder: str, min_size: int | None) -> None:
    for claim in (jpeg_that_claims, png_that_claims):
        for side in (30000, 16000):
            with pytest.raises(ValueError, match=r"max_pixels|decompression bomb"):
                formats.decode_image(claim(side, side), decoder_name(decoder), min_size)
    small = png_of(20, 10)
    assert formats.decode_image(small, decoder, max_pixels=200).shape == (3, 10, 20)
    with pytest.raises(ValueError, match="10 by 20 pixels is larger than max_pixels, which is 199"):
        formats.decode_image(small, decoder, max_pixels=199)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_folder_names_the_image_that_is_too_large(decoder: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "long.png").write_bytes(png_of(1, 60000))
    (tmp_path / "a" / "wide.jpg").write_bytes(jpeg_that_claims(30000, 30000))
    folder = formats.ImageFolder(tmp_path, decoder=decoder, image_size=224)
    assert folder[0][0].shape == (3, 224, 224)  # of 13 million rows the middle alone is made
    with pytest.raises(FormatError, match=r"wide\.jpg.*(max_pixels|bomb)"):
        folder[1]


@pytest.mark.parametrize("change", ["cut", "rewritten"])
def test_a_parquet_file_that_changes_in_an_epoch(change: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "rows.parquet"

    def write(first: int) -> None:
        table = arrow.table({"x": np.arange(first, first + 4000), "y": ["text"] * 4000})
        parquet.write_table(table, path, row_group_size=1000, compression=None)

    write(0)
    dataset = fs.open(path)
    assert dataset[0]["x"] == 0
    if change == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        data = path.read_bytes()
        write(70000)
        other = path.read_bytes()
        assert len(other) == len(data)
        os.utime(path, ns=(1, 1))
    with pytest.raises(FormatError, match=r"rows\.parquet"):
        [dataset[i] for i in (1500, 2500, 3500)]


def test_paths_that_are_none(tmp_path: Path) -> None:
    for bad in (None, 3):
        with pytest.raises(TypeError, match="must be a path, or a list of paths"):
            fs.open(bad)  # type: ignore[arg-type]
    for url in ("s3://bucket/x.tar", "https://host/x.npy", "hf://datasets/x"):
        with pytest.raises(FormatError, match="is a URL"):
            fs.open(url)
    np.save(tmp_path / "x.npy", np.arange(6).reshape(3, 2))
    assert len(fs.open(os.fsencode(tmp_path / "x.npy"))) == 3  # type: ignore[arg-type]


def test_links_in_a_circle_end_and_other_links_are_followed(tmp_path: Path) -> None:
    for name in ("top/a", "top/b", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("top/a/1.png", "elsewhere/2.png"):
        (tmp_path / name).write_bytes(png_of(2, 2))
    (tmp_path / "top/a/up").symlink_to(tmp_path / "top/b")
    (tmp_path / "top/b/down").symlink_to(tmp_path / "top/a")
    (tmp_path / "top/b/away").symlink_to(tmp_path / "elsewhere")
    folder = formats.ImageFolder(tmp_path / "top")
    names = [path.removeprefix(f"{tmp_path}/top/") for path, _ in folder.samples]
    assert names == ["a/1.png", "a/up/away/2.png", "b/away/2.png", "b/down/1.png"]
    assert fs.open(tmp_path / "top").classes == ["a", "b"]


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "closed").mkdir(parents=True)
    (tmp_path / "a" / "1.png").write_bytes(png_of(2, 2))
    scandir = os.scandir

    def refused(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(PermissionError, match="closed"):
        list(walked(str(tmp_path)))
    with pytest.raises(PermissionError, match="closed"):
        formats.ImageFolder(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_claims_much(kind: bytes, tmp_path: Path) -> None:
    info = tarfile.TarInfo("bomb")
    info.type, info.size = kind, 500 << 20
    path = tmp_path / "x.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(info.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(500):
            file.write(bytes(1 << 20))
    with pytest.raises(FormatError, match=r"x\.tar\.gz.*a header has 524288000 bytes"):
        list(formats.TarDataset(path))


def test_notes_beside_tables(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = arrow.table({"x": [1, 2, 3]})
    for name in ("hub", "saved"):
        (tmp_path / name).mkdir()
        for note in ("README.md", "dataset_info.json", "state.json", ".gitattributes"):
            (tmp_path / name / note).write_text("{}")
    parquet.write_table(table, tmp_path / "hub" / "train.parquet")
    with arrow.ipc.new_stream(
        tmp_path / "saved" / "data-00000-of-00001.arrow", table.schema
    ) as out:
        out.write_table(table)
    for name in ("hub", "saved"):
        assert [int(sample["x"]) for sample in fs.open(tmp_path / name)] == [1, 2, 3]


@pytest.mark.parametrize("shape", [(1, 60000), (60000, 1), (3, 1000), (50, 1001), (1000, 40)])
def test_only_the_middle_of_a_long_image_is_resized(shape: tuple[int, int]) -> None:
    image = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
    small = images.resized(image, 8)
    sides = [int(8 * side / min(shape)) for side in shape]
    whole = torch.nn.functional.interpolate(image[None], sides, mode="bilinear", antialias=True)[0]
    top, left = (round((side - 8) / 2) for side in sides)
    whole = whole[:, top : top + 8, left : left + 8]
    assert (small.int() - whole.int()).abs().max() <= 1
    if max(shape) > 16 * min(shape):
        assert images.resized(image, 1024).shape == (3, 1024, 1024)  # whole: up to 190 GB


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize("between", [False, True])
def test_headers_that_add_up(kind: bytes, between: bool, tmp_path: Path) -> None:
    """A chain before one file, or global ones that all later files would have."""

    def header(number: int) -> bytes:
        text = b" k%03d=%s\n" % (number, b"x" * 500_000)
        text = b"%d%s" % (len(text) + 6, text)
        info = tarfile.TarInfo("many")
        info.type, info.size = kind, len(text)
        return info.tobuf(tarfile.USTAR_FORMAT) + text + bytes(-len(text) % 512)

    info = tarfile.TarInfo()
    path = tmp_path / "x.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for number in range(9):
            info.name = f"{number}.raw"
            file.write(header(number) + (info.tobuf(tarfile.USTAR_FORMAT) if between else b""))
        info.name = "z.raw"
        file.write(info.tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    if between and kind != tarfile.XGLTYPE:  # each is of its own file only
        assert list(formats.TarDataset(path, columns=["__key__"]))[-1] == {"__key__": "z"}
    else:
        with pytest.raises(FormatError, match=r"x\.tar\.gz.*1048576 are allowed for a file"):
            list(formats.TarDataset(path))


@pytest.mark.parametrize("keys", [b"", b"abz"])
def test_named_databases_of_lmdb(tmp_path: Path, keys: bytes) -> None:
    lmdb = pytest.importorskip("lmdb")
    for name in ("plain", "named"):
        with lmdb.open(str(tmp_path / name), max_dbs=2) as environment:
            inside = environment.open_db(b"train") if name == "named" else None
            with environment.begin(write=True) as transaction:
                for key in keys or b"a" * (name == "plain"):
                    transaction.put(bytes([key]), b"x" * 48)
                if inside is not None:
                    transaction.put(b"1", b"one", db=inside)
    assert fs.open(tmp_path / "plain")[0] == b"x" * 48
    with pytest.raises(FormatError, match=r"named databases \(b'train'"):
        fs.open(tmp_path / "named")
    dataset = formats.LMDBDataset(tmp_path / "named", keys=[*map(chr, keys[2:]), "train"])
    assert [dataset[i] for i in range(len(dataset) - 1)] == [b"x" * 48] * len(keys[2:])
    with pytest.raises(FormatError, match=r"named databases \(b'train'"):
        dataset[-1]


def test_what_save_to_disk_writes(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for number, name in enumerate(("data-00000-of-00002", "data-00001-of-00002", "cache-1f")):
            table = arrow.table({"x": [number], "text": [split]})
            with arrow.ipc.new_stream(tmp_path / split / f"{name}.arrow", table.schema) as out:
                out.write_table(table)
        files = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
        (tmp_path / split / "state.json").write_text(json.dumps({"_data_files": files}))
        (tmp_path / split / "dataset_info.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    found = [fs.open(tmp_path / "test")[i] for i in range(2)]
    assert [(int(sample["x"]), sample["text"]) for sample in found] == [(0, "test"), (1, "test")]
    assert len(fs.open(tmp_path / "test")) == 2  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=r"open one of its folders, .*'test', 'train'"):
        fs.open(tmp_path)
    (tmp_path / "test" / "state.json").write_text('{"_data_files": [{}]}')
    with pytest.raises(FormatError, match=r"state\.json"):
        fs.open(tmp_path / "test")


def test_a_parquet_file_that_changes_while_it_is_closed(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    paths = [tmp_path / f"{i:02}.parquet" for i in range(40)]
    for i, path in enumerate(paths):
        parquet.write_table(arrow.table({"x": [i, i]}), path)
    dataset = fs.open(paths)
    assert [int(dataset[2 * i]["x"]) for i in range(40)] == [*range(40)]
    parquet.write_table(arrow.table({"x": [7, 7]}), paths[0])
    os.utime(paths[0], ns=(1, 1))
    with pytest.raises(FormatError, match=r"00\.parquet: the file is not what it was"):
        dataset[0]
