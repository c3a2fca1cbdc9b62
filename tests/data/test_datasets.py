"""ArrayDataset and TokenDataset: what they hold, and how they say no."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from faststep.data import ArrayDataset, DataLoader, TokenDataset

from .torch_and_ours import assert_same

WRONG: list[tuple[Any, str]] = [
    ({}, "no array"),
    ([torch.ones(3), {"x": torch.ones(4)}], r"data\[1\]\['x'\] has 4 rows, data\[0\] has 3"),
]
WRONG_TYPES: list[tuple[Any, str]] = [
    (torch.ones(()), "data has no rows"),
    ({"x": [torch.ones(2), "text"]}, r"data\['x'\]\[1\] is a str"),
    (np.array(["a"]), r"data: .*(str|U1)"),
    (np.array([None]), "data: .*object"),
    (np.zeros(3, ">i4"), "data: .*byte order"),
    (np.float64(3.0), "data is a float64"),
]


@pytest.mark.parametrize(("data", "message"), WRONG)
def test_wrong_shapes(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArrayDataset(data)


@pytest.mark.parametrize(("data", "message"), WRONG_TYPES)
def test_wrong_types(data: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ArrayDataset(data)


def test_samples_keep_their_containers() -> None:
    dataset = ArrayDataset({"x": (torch.arange(6).view(3, 2), [np.ones(3)])})
    sample = dataset[-1]
    assert torch.equal(sample["x"][0], torch.tensor([4, 5]))
    assert torch.equal(sample["x"][1][0], torch.tensor(1.0, dtype=torch.float64))
    with pytest.raises(IndexError):
        dataset[3]


def test_a_sample_of_a_read_only_array_may_be_changed(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12).reshape(4, 3))
    dataset = ArrayDataset(np.load(tmp_path / "x.npy", mmap_mode="r"))
    dataset[1].add_(5)
    assert dataset[1].tolist() == [3, 4, 5]
    batch = next(iter(DataLoader(dataset, 4)))
    batch.add_(1)
    assert dataset[0].tolist() == [0, 1, 2]


def test_memory_maps(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((100, 7)))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert_same(lambda: (ArrayDataset({"x": mapped[3:]}), {"batch_size": 8, "shuffle": True}))


# ---- tokens ----


def shards(folder: Path, dtype: str = "uint16") -> list[Path]:
    """Shards of many lengths, one with no room for a window, one empty."""
    files, generator = [], np.random.default_rng(3)
    for i, length in enumerate((100, 9, 41, 0, 33)):
        tokens = generator.integers(0, np.iinfo(dtype).max, length, dtype, endpoint=True)
        files.append(folder / (f"{i}.npy" if i % 4 == 2 else f"{i}.bin"))
        if files[-1].suffix == ".npy":
            np.save(files[-1], tokens)
        else:
            tokens.tofile(files[-1])
    return files


def windows(files: list[Path], token: str, window: int, stride: int) -> list[tuple[Any, Any]]:
    """Every window, the slow way."""
    found = []
    for file in files:
        tokens = np.load(file) if file.suffix == ".npy" else np.fromfile(file, token)
        numbers = tokens.astype(np.int64).tolist()
        for i in range(0, len(numbers), stride):
            both = numbers[i : i + window + 1]
            if len(both) == window + 1:
                found.append((both[:-1], both[1:]))
    return found


@pytest.mark.parametrize("token", ["uint16", "uint32"])
@pytest.mark.parametrize("stride", [None, 1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_windows(tmp_path: Path, token: str, stride: int | None, dtype: torch.dtype) -> None:
    if (token, dtype) == ("uint32", torch.int32):
        return
    files = shards(tmp_path, token)

    def make() -> tuple[Any, dict[str, Any]]:
        data = TokenDataset(files, 10, stride=stride, token_dtype=token, dtype=dtype)
        return data, {"batch_size": 3}

    want = windows(files, token, 10, stride or 10)
    dataset = make()[0]
    assert len(dataset) == len(want)
    got = [(x.tolist(), y.tolist()) for x, y in (dataset[i] for i in range(len(dataset)))]
    assert got == want
    assert dataset[0][0].dtype == dtype
    assert dataset[-1][1].tolist() == want[-1][1]
    with pytest.raises(IndexError):
        dataset[len(want)]
    assert_same(make)
    batches = [(x.tolist(), y.tolist()) for x, y in DataLoader(dataset, 1)]
    assert [(x[0], y[0]) for x, y in batches] == want


def test_token_datasets_are_joined_and_chosen_from(tmp_path: Path) -> None:
    files = shards(tmp_path)

    def make() -> tuple[Any, dict[str, Any]]:
        both = ConcatDataset([TokenDataset(files, 8), TokenDataset(files[2], 8, stride=1)])
        return Subset(both, range(1, len(both), 2)), {"batch_size": 4, "shuffle": True}

    assert_same(make)


def test_a_pickled_dataset_holds_no_tokens(tmp_path: Path) -> None:
    np.zeros(100_000, np.uint16).tofile(tmp_path / "t.bin")
    dataset = TokenDataset(tmp_path / "t.bin", 8)
    data = pickle.dumps(dataset)
    assert len(data) < 1000
    assert len(pickle.loads(data)) == len(dataset)
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "one.bin")
    (window,) = TokenDataset(str(tmp_path / "one.bin"), 8)
    assert [part.tolist() for part in window] == [[*range(8)], [*range(1, 9)]]


def test_wrong_files(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    np.zeros(8, np.uint16).tofile(tmp_path / "short.bin")
    np.save(tmp_path / "flat.npy", np.zeros((3, 3), np.uint16))
    np.save(tmp_path / "float.npy", np.zeros(30))
    np.save(tmp_path / "swapped.npy", np.zeros(30, ">u2"))
    np.save(tmp_path / "wide.npy", np.zeros(30, np.uint32))
    for name, options, message in (
        ("odd.bin", {}, "odd.bin: 3 bytes are not whole tokens"),
        ("short.bin", {}, "a window takes 9 tokens, the longest of 1 files has 8"),
        ("flat.npy", {}, r"flat.npy has the shape \(3, 3\)"),
        ("float.npy", {}, "float.npy: tokens of <f8"),
        ("swapped.npy", {}, "swapped.npy: tokens of >u2"),
        ("wide.npy", {"dtype": torch.int32}, "wide.npy: tokens of <u4 as torch.int32"),
        ("short.bin", {"token_dtype": "int8"}, "token_dtype 'int8'"),
        ("short.bin", {"stride": 0}, "stride 0"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenDataset(tmp_path / name, 8, **options)
    with pytest.raises(FileNotFoundError):
        TokenDataset(tmp_path / "none.bin", 8)
    with pytest.raises(ValueError, match="the longest of 0 files has 0"):
        TokenDataset([], 8)


class _OwnColumns(TokenDataset):
    """A script's names for its own things."""

    columns = ("input_ids",)
    structure = "dict"

    def __getitem__(self, index: int) -> Any:
        x, _ = super().__getitem__(index)
        return {"input_ids": x + 1}


class _OwnColumnsMethod(_OwnColumns):
    def columns(self) -> Any:  # type: ignore[override]
        return ["input_ids"]


@pytest.mark.parametrize("kind", [_OwnColumns, _OwnColumnsMethod])
def test_a_subclass_may_use_any_name(tmp_path: Path, kind: type[TokenDataset]) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "t.bin")
    dataset = kind(tmp_path / "t.bin", 8)
    batch = next(iter(DataLoader(dataset, batch_size=4)))
    want = next(iter(torch.utils.data.DataLoader(dataset, batch_size=4)))
    assert list(batch) == ["input_ids"]
    assert torch.equal(batch["input_ids"], want["input_ids"])
