"""Tars and zip archives of samples: fields, splitting by rank and worker, and damage anywhere."""

import gzip
import io
import json
import pickle
import random
import struct
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

import faststep.data
from faststep.data import DataLoader, FormatError, convert
from faststep.data.formats import TarDataset, ZipDataset, decode_image, fields, zips

from .torch_and_ours import plain


def write(path: Path, files: dict[str, bytes], mode: str = "w", **options: Any) -> Path:
    with tarfile.open(path, mode, **options) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def numbered(folder: Path, shards: int, samples: int = 4) -> list[int]:
    """Shards whose samples have numbers; of shard i, i more than `samples`."""
    numbers = []
    for shard in range(shards):
        files = {}
        for i in range(samples + shard):
            numbers.append(100 * shard + i)
            files[f"s/{numbers[-1]:05d}.cls"] = b"%d" % numbers[-1]
        write(folder / f"train-{shard:03d}.tar", files)
    return numbers


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_fields_are_decoded(tmp_path: Path, mode: str, form: int) -> None:
    folder = "deep/" + "er" * 45
    first = {
        "cls": b"7",
        "json": json.dumps({"a": [1, None]}).encode(),
        "txt": "grün".encode(),
        "x.npy": npy(np.arange(6).reshape(2, 3)),
        "bin": b"\0\1",
    }
    files = {f"{folder}/a.{name}": data for name, data in first.items()}
    files |= {"README": b"no field", "b.cls": b"8", "c/.hidden": b"no name"}
    path = write(tmp_path / "x", files, mode, format=form)
    samples = [*faststep.data.open(path)]
    assert plain(samples) == plain(
        [
            {
                "__key__": f"{folder}/a",
                "cls": 7,
                "json": {"a": [1, None]},
                "txt": "grün",
                "x.npy": torch.arange(6).view(2, 3),
                "bin": b"\0\1",
            },
            {"__key__": "b", "cls": 8},
        ]
    )
    assert [*TarDataset(path, decoders={})][1] == {"__key__": "b", "cls": b"8"}
    own = TarDataset(path, decoders={"cls": lambda data: -int(data)}, columns=["cls"])
    assert [*own] == [{"cls": -7}, {"cls": -8}]
    assert [*TarDataset(path, columns=["cls"], transform=lambda s: s["cls"])] == [7, 8]


def test_images(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (8, 5, 3), dtype=np.uint8)
    file = io.BytesIO()
    image_module.fromarray(pixels).save(file, "PNG")
    (sample,) = faststep.data.open(write(tmp_path / "x", {"a.png": file.getvalue()}))
    assert torch.equal(sample["png"], torch.from_numpy(pixels).permute(2, 0, 1))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_shard_is_read_once(tmp_path: Path, workers: int, world_size: int) -> None:
    numbers = numbered(tmp_path, 5)
    pattern = tmp_path / "train-{000..004}.tar"
    seen = []
    for rank in range(world_size):
        dataset = TarDataset(pattern, rank=rank, world_size=world_size)
        loader = TorchLoader(pickle.loads(pickle.dumps(dataset)), None, num_workers=workers)
        seen += [sample["cls"] for sample in loader]
    assert sorted(seen) == numbers
    with pytest.raises(FormatError, match="5 files for 6 ranks"):
        next(iter(TarDataset(pattern, rank=0, world_size=6)))


def test_shards_are_shuffled_alike_on_all_ranks(tmp_path: Path) -> None:
    numbers = numbered(tmp_path, 6)
    parts = [
        TarDataset(tmp_path / "*.tar", shuffle_shards=True, rank=rank, world_size=2)
        for rank in range(2)
    ]
    loaders = [TorchLoader(p, None, num_workers=1, persistent_workers=True) for p in parts]
    orders = []
    for epoch in range(4):
        for part in parts:
            part.set_epoch(epoch)
        orders.append([sample["cls"] for loader in loaders for sample in loader])
        assert sorted(orders[-1]) == numbers
    assert len({tuple(order) for order in orders}) == 4
    with pytest.raises(ValueError, match="give both or none"):
        TarDataset(tmp_path / "*.tar", rank=1)
    with pytest.raises(FileNotFoundError, match="no file fits"):
        TarDataset(tmp_path / "*.tgz")


def test_what_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    for field, data in (("cls", b"x"), ("json", b"{"), ("npy", b"\x93NUM"), ("png", b"\x89PNG")):
        path = write(tmp_path / "x", {"a.txt": b"", f"b.{field}": data})
        with pytest.raises(FormatError, match=rf"x: sample 1 \('b'\), field '{field}': "):
            list(TarDataset(path))
    path = write(tmp_path / "x", {"a.cls": b"1", "b.txt": b"1"})
    with pytest.raises(FormatError, match=r"x: sample 1 \('b'\) has no \['cls'\]"):
        list(TarDataset(path, columns=["cls"]))
    path = write(tmp_path / "x", {"a.cls": b"1", "a.__key__": b"b"})
    with pytest.raises(FormatError, match="x: sample 'a' has the field '__key__' twice"):
        list(TarDataset(path))
    with tarfile.open(path, "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("a.cls"))
    with pytest.raises(FormatError, match="x: sample 'a' has the field 'cls' twice"):
        list(TarDataset(path))


def test_a_tar_that_ends_early_is_noticed_anywhere(tmp_path: Path) -> None:
    """At every header and in every file: tarfile alone takes most of these for the end."""
    files = {f"{i}.bin": bytes([i]) * (100 + 512 * i) for i in range(4)}
    whole = write(tmp_path / "x", files).read_bytes()
    assert len([*TarDataset(tmp_path / "x")]) == 4
    end = sum(512 + (len(data) + 511) // 512 * 512 for data in files.values())
    for size in range(512, end + 1, 128):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"cut: file [0-4]: "):
            list(TarDataset(tmp_path / "cut"))
    (tmp_path / "cut").write_bytes(whole[:300])
    with pytest.raises(FormatError, match=r"cut: "):
        list(TarDataset(tmp_path / "cut"))
    for at in (20, 1030, 1060):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        (tmp_path / "bad").write_bytes(damaged)
        with pytest.raises(FormatError, match=r"bad: "):
            list(TarDataset(tmp_path / "bad"))
    write(tmp_path / "packed", files, "w:gz")
    packed = (tmp_path / "packed").read_bytes()
    (tmp_path / "bad").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(FormatError, match=r"bad: "):
        list(TarDataset(tmp_path / "bad"))


def test_the_rank_is_torch_distributeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for when the files are read, and kept for workers that cannot ask."""
    numbered(tmp_path, 4, 1)
    dataset = TarDataset(tmp_path / "*.tar")
    assert len(dataset.shards()) == 4
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert dataset.shards() == [str(tmp_path / f"train-{i:03d}.tar") for i in (1, 3)]
    pickled = pickle.dumps(dataset)
    monkeypatch.undo()
    assert pickle.loads(pickled).shards() == [str(tmp_path / f"train-{i:03d}.tar") for i in (1, 3)]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_where_it_was(tmp_path: Path, workers: int) -> None:
    """In its own order, and without decoding what came before."""
    numbered(tmp_path, 5)
    decoded: list[int] = []

    def decode(data: bytes) -> int:
        decoded.append(int(data))
        return int(data)

    options: dict[str, Any] = {"num_workers": workers}
    if workers:
        options["worker_method"] = "thread"

    def make() -> faststep.data.DataLoader[Any]:
        data = TarDataset(tmp_path / "*.tar", decoders={"cls": decode}, shuffle_shards=True)
        return faststep.data.DataLoader(data, 3, **options)

    loader = make()
    loader.dataset.set_epoch(3)
    batches: list[Any] = []
    states: list[Any] = []
    for batch in loader:
        batches.append(plain(batch))
        states.append(loader.state_dict())
    assert len(decoded) == 30
    for place, state in enumerate(states):
        decoded.clear()
        other = make()
        other.load_state_dict(state)
        assert [plain(batch) for batch in other] == batches[place + 1 :]
        assert len(decoded) <= 30 - 3 * (place + 1)
    assert other.dataset.epoch == 3
    other.load_state_dict(states[2])
    other.dataset.set_epoch(4)
    with pytest.raises(ValueError, match="in the middle of epoch 3, but the dataset was set to"):
        next(iter(other))
    fewer = TarDataset(sorted(tmp_path.glob("*.tar"))[:4], decoders={"cls": decode})
    other = faststep.data.DataLoader(fewer, 3, **options)
    other.load_state_dict(states[2])
    with pytest.raises(ValueError, match="of a stream of 5 files, not 4"):
        next(iter(other))


def test_suffixes_are_compared_without_case(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"A.CLS": b"1", "A.Seg.TXT": b"a", "b.cls": b"2"})
    assert [*faststep.data.open(path)] == [
        {"__key__": "A", "cls": 1, "seg.txt": "a"},
        {"__key__": "b", "cls": 2},
    ]
    own = TarDataset(path, decoders={"CLS": lambda data: -int(data)}, columns=["Cls"])
    assert [*own] == [{"cls": -1}, {"cls": -2}]
    twice = write(tmp_path / "twice", {"a.cls": b"1", "a.CLS": b"2"})
    with pytest.raises(FormatError, match="sample 'a' has the field 'cls' twice"):
        list(TarDataset(twice))


def test_files_in_gzip_are_unpacked(tmp_path: Path) -> None:
    packed = {name: gzip.compress(data) for name, data in {"json": b"[1]", "bin": b"raw"}.items()}
    files = {"a.json.gz": packed["json"], "a.x.BIN.GZ": packed["bin"], "a.gz": packed["bin"]}
    files["a.cls.gz.gz"] = gzip.compress(gzip.compress(b"7"))
    files["a.txt.gz"] = gzip.compress(b"in ") + gzip.compress(b"two parts")
    path = write(tmp_path / "x", files)
    (sample,) = TarDataset(path)
    assert sample == {
        "__key__": "a",
        "json.gz": [1],
        "x.bin.gz": b"raw",
        "gz": b"raw",
        "cls.gz.gz": 7,
        "txt.gz": "in two parts",
    }
    (sample,) = TarDataset(path, decoders={})
    assert sample["json.gz"] == packed["json"]
    for own in ({"json.gz": len}, {"gz": len}):
        (sample,) = TarDataset(path, decoders=own, columns=["json.gz"])
        assert sample == {"json.gz": len(packed["json"])}


BAD_GZIP = {
    "cut off": gzip.compress(b"[1]" * 99)[:-9],
    "no gzip": b"[1]",
    "changed": gzip.compress(b"[1]")[:-8] + bytes(8),
    "followed": gzip.compress(b"[1]") + b"more",
    "empty": b"",
    "damaged": b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + b"\xff" * 20,
}


@pytest.mark.parametrize("kind", BAD_GZIP)
def test_damaged_files_in_gzip(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "x", {"a.cls": b"1", "b.json.gz": BAD_GZIP[kind]})
    with pytest.raises(FormatError, match=r"x: sample 1 \('b'\), field 'json\.gz': ."):
        list(TarDataset(path))


def refuse_in_little_memory(path: Path, message: str) -> None:
    tracemalloc.start()
    with pytest.raises(FormatError, match=message):
        list(TarDataset(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "MOST_UNPACKED", 3 << 20)
    for size, fits in ((3 << 20, True), ((3 << 20) + 1, False), (300 << 20, False)):
        path = write(tmp_path / "x", {"a.bin.gz": gzip.compress(bytes(size), 1)})
        if fits:
            assert len(next(iter(TarDataset(path)))["bin.gz"]) == size
        else:
            refuse_in_little_memory(path, r"'bin\.gz': it has more than 3145728 bytes")


LARGE = 8 << 30


@pytest.mark.parametrize("kind", "0xgLKS5")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [LARGE, LARGE - 1, 2**60, -1, -512])
def test_a_wrong_size_takes_no_memory(tmp_path: Path, kind: str, packed: bool, size: int) -> None:
    member = tarfile.TarInfo("big.bin")
    member.size, member.type = size, kind.encode()
    data = member.tobuf(tarfile.GNU_FORMAT) + b"abc" * 1000
    whole = (write(tmp_path / "whole", {"a.cls": b"1"})).read_bytes()[:1024] + data
    (tmp_path / "x").write_bytes(gzip.compress(whole) if packed else whole)
    message = r"x: file [12]: ." if kind != "0" else "x: file 1: ."
    refuse_in_little_memory(tmp_path / "x", message)


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_of_many_pieces_is_whole(tmp_path: Path, packed: bool) -> None:
    data = np.random.default_rng(0).bytes((5 << 20) + 3)
    path = write(tmp_path / "x", {"a.bin": data}, "w:gz" if packed else "w")
    assert next(iter(TarDataset(path)))["bin"] == data
    cut = path.read_bytes()[: 3 << 20]
    path.write_bytes(cut)
    with pytest.raises(
        FormatError, match=r"x: file 0: ('a\.bin' is cut off|Compressed file ended)"
    ):
        list(TarDataset(path))


PACKED = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]


def write_zip(path: Path, files: dict[str, bytes], packed: int = zipfile.ZIP_DEFLATED) -> Path:
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
    dataset: Any = faststep.data.open(write_zip(tmp_path / "x", files, packed))
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
        write_zip(
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
    write_zip(tmp_path / "y", {"s.npy": array.getvalue(), "s.cls": b"1"})
    assert ZipDataset(tmp_path / "y")[0]["npy"].tolist() == [0, 1, 2]
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(FormatError, match="is none of"):
        faststep.data.open(tmp_path / "model.pt")


@pytest.mark.parametrize("packed", PACKED)
def test_damage_anywhere(tmp_path: Path, packed: int) -> None:
    want = [b"abc" * 30, b"0123456789" * 9, b""]
    whole = write_zip(tmp_path / "x", {f"{i}.raw": data for i, data in enumerate(want)}, packed)
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
    path = patched(write_zip(tmp_path / "x", {"a.raw": bytes(100000)}), fields)
    with pytest.raises(FormatError, match=rf"/x: .*{message}"):
        ZipDataset(path)[0]


def test_archives_without_samples(tmp_path: Path) -> None:
    for files in ({}, {"dir/": b"", "LICENSE": b"x"}):
        with pytest.raises(FormatError, match="no file with a name and a suffix is in it"):
            faststep.data.open(write_zip(tmp_path / "x", files))
    write_zip(tmp_path / "x", {"a.txt": b"1", "A.txt": b"2"})
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes().replace(b"A", b"a"))
    with pytest.raises(FormatError, match="sample 'a' has the field 'txt' twice"):
        ZipDataset(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        ZipDataset(tmp_path / "none.zip")


def test_an_image_of_too_many_pixels(tmp_path: Path) -> None:
    data = png(1)
    write_zip(tmp_path / "x", {"a.png": data[:16] + struct.pack(">II", 30000, 30000) + data[24:]})
    with pytest.raises(FormatError, match=r"/x: sample 0 \('a'\), field 'png': "):
        ZipDataset(tmp_path / "x")[0]
    assert zips.BASIC["png"] is decode_image


def test_names_that_no_unicode_has(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x", {"aé.txt": b"1"})
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xfe"))
    with pytest.raises(FormatError, match="/x: "):
        ZipDataset(path)
