"""Tars of samples: fields, splitting by rank and worker, and damage anywhere."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import faststep.data
from faststep.data import FormatError
from faststep.data.formats import TarDataset, fields

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
        loader = DataLoader(pickle.loads(pickle.dumps(dataset)), None, num_workers=workers)
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
    loaders = [DataLoader(p, None, num_workers=1, persistent_workers=True) for p in parts]
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
