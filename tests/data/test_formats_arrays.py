"""Files that are arrays: told by their content, mapped, pickled by their path, and damaged."""

import gzip
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import faststep.data
from faststep.data import ArrayDataset, FormatError

from .torch_and_ours import assert_same


def cut(path: Path, size: int) -> Path:
    """A copy that ends early; from the end with a negative size."""
    short = path.with_name(f"cut{size}{path.suffix}")
    short.write_bytes(path.read_bytes()[:size])
    return short


def test_npy_is_mapped_whatever_its_name(tmp_path: Path) -> None:
    data = np.random.default_rng(0).standard_normal((50, 3, 2)).astype(np.float32)
    with open(tmp_path / "data.bin", "wb") as file:
        np.save(file, data)
    dataset = faststep.data.open(tmp_path / "data.bin")
    assert isinstance(dataset, ArrayDataset)
    assert isinstance(dataset.data, np.memmap)
    assert torch.equal(dataset[7], torch.from_numpy(data[7]))
    assert_same(
        lambda: (faststep.data.open(tmp_path / "data.bin"), {"batch_size": 8, "shuffle": True})
    )
    assert len(pickle.dumps(dataset)) < 300
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[-1], dataset[-1])


def test_damaged_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((20, 4)))
    np.save(tmp_path / "text.npy", np.array(["a"]))
    np.save(tmp_path / "object.npy", np.array([None]), allow_pickle=True)
    np.save(tmp_path / "point.npy", np.array(3.0))
    for size in (7, 30, 400):
        with pytest.raises(FormatError, match=rf"cut{size}.npy: "):
            faststep.data.open(cut(tmp_path / "x.npy", size))
    for name, message in (("text", "str|U1"), ("object", "mapped|object"), ("point", "no rows")):
        with pytest.raises(FormatError, match=rf"{name}.npy: .*({message})"):
            faststep.data.open(tmp_path / f"{name}.npy")
    with pytest.raises(FileNotFoundError, match=r"none.npy"):
        faststep.data.open(tmp_path / "none.npy")
    np.save(tmp_path / "empty.npy", np.zeros((0, 4)))
    assert len(faststep.data.open(tmp_path / "empty.npy")) == 0


def test_npz_says_what_to_do(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(10), b=np.ones((10, 2)))
    with pytest.raises(FormatError, match=r"x.npz: .*cannot be mapped.*faststep convert"):
        faststep.data.open(tmp_path / "x.npz")
    sample = faststep.data.open(tmp_path / "x.npz", read=True)[3]
    assert sample["a"] == 3
    with pytest.raises(FormatError, match=r"cut300.npz: "):
        faststep.data.open(cut(tmp_path / "x.npz", 300), read=True)
    damaged = bytearray((tmp_path / "x.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "x.npz") as file:
        damaged[file.getinfo("b.npy").header_offset + 200] ^= 1
    (tmp_path / "z.npz").write_bytes(damaged)
    with pytest.raises(FormatError, match=r"z.npz: 'b': .*CRC"):
        faststep.data.open(tmp_path / "z.npz", read=True)


def test_safetensors(tmp_path: Path) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    tensors = {
        "image": torch.arange(60, dtype=torch.uint8).view(10, 3, 2),
        "half": torch.randn(10, 5).bfloat16(),
        "other": torch.ones(4),
    }
    safetensors_torch.save_file(tensors, tmp_path / "x")
    with pytest.raises(FormatError, match=r"x: 'other' has 4 rows, 'half' has 10.*columns="):
        faststep.data.open(tmp_path / "x")
    with pytest.raises(FormatError, match="x: there is no tensor 'none' among"):
        faststep.data.open(tmp_path / "x", columns=["none"])

    def make() -> tuple[Any, dict[str, Any]]:
        data = faststep.data.open(tmp_path / "x", columns=["half", "image"])
        return data, {"batch_size": 4}

    assert_same(make)
    dataset = make()[0]
    assert torch.equal(dataset[3]["half"], tensors["half"][3])
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[9]["image"], tensors["image"][9])
    for size in (120, -1):
        with pytest.raises(FormatError, match=rf"cut{size}: "):
            faststep.data.open(cut(tmp_path / "x", size))


def test_a_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes((2).to_bytes(8, "little") + b"{}")
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(__import__("sys").modules, "safetensors", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'faststep\[safetensors\]'"):
        faststep.data.open(tmp_path / "x")


def test_what_is_not_known_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(b"\1\2\3\4" * 100)
    (tmp_path / "packed").write_bytes(gzip.compress(b"\1\2\3\4" * 100))
    (tmp_path / "empty").write_bytes(b"")
    torch.save({"x": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(FormatError, match=r"model.pt: its content, .*none of npy, npz"):
        faststep.data.open(tmp_path / "model.pt")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    with pytest.raises(FormatError, match=r"tokens.bin: its content, .*none of npy, npz.*TokenD"):
        faststep.data.open(tmp_path / "tokens.bin")
    with pytest.raises(FormatError, match=r"packed: .*gzip data must be decompressed first"):
        faststep.data.open(tmp_path / "packed")
    with pytest.raises(FormatError, match="empty: the file is empty"):
        faststep.data.open(tmp_path / "empty")
    with pytest.raises(FormatError, match="folder: the directory holds neither"):
        faststep.data.open(tmp_path / "folder")
    with pytest.raises(FormatError, match="no file"):
        faststep.data.open([])


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.arange(5) + 10 * i)
    assert_same(lambda: (faststep.data.open(tmp_path), {"batch_size": 4}))
    files = [tmp_path / "2.npy", tmp_path / "0.npy"]
    assert [int(x) for x in faststep.data.open(files)] == [20, 21, 22, 23, 24, 0, 1, 2, 3, 4]
    assert len(faststep.data.open(tmp_path / "{0..1}.npy")) == 10
    with pytest.raises(FileNotFoundError, match=r"3.npy"):
        faststep.data.open(tmp_path / "{0..7}.npy")
    np.savez(tmp_path / "3.npz", np.arange(3))
    with pytest.raises(FormatError, match=r"3.npz is npz, but .*0.npy is npy"):
        faststep.data.open(tmp_path)
