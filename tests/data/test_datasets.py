"""ArrayDataset and TokenDataset: what they hold, how they say no, and where documents begin."""

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import ConcatDataset, Subset

from faststep.data import ArrayDataset, DataLoader, TokenDataset, TokenWindow, cu_seqlens

from .torch_and_ours import assert_same

WRONG: list[tuple[Any, type[Exception], str]] = [
    ({}, ValueError, "no array"),
    (
        [torch.ones(3), {"x": torch.ones(4)}],
        ValueError,
        r"data\[1\]\['x'\] has 4 rows, data\[0\] has 3",
    ),
    (torch.ones(()), TypeError, "data has no rows"),
    ({"x": [torch.ones(2), "text"]}, TypeError, r"data\['x'\]\[1\] is a str"),
    (np.array(["a"]), TypeError, r"data: .*(str|U1)"),
    (np.array([None]), TypeError, "data: .*object"),
    (np.zeros(3, ">i4"), TypeError, "data: .*byte order"),
    (np.float64(3.0), TypeError, "data is a float64"),
]


@pytest.mark.parametrize(("data", "error", "message"), WRONG)
def test_wrong_data(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
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
        ("short.bin", {"eos": 1, "bos": 2}, "eos 1 and bos 2: give one"),
        ("short.bin", {"eos": 1 << 16}, "eos 65536: .*t.bin has tokens from 0 to 65535"),
        ("short.bin", {"bos": -1}, "bos -1: .*t.bin has tokens"),
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


# ---- documents ----


MARK = 5


def write_tokens(path: Path, length: int, token: str = "uint16") -> list[int]:
    tokens = np.random.default_rng(length).integers(0, 12, length).astype(token)
    tokens.tofile(path)
    return [int(t) for t in tokens]


def divided(x: list[int], side: str) -> tuple[list[int], list[int]]:
    """Position and document ids, one token after another."""
    positions, documents = [0], [0]
    for before, here in itertools.pairwise(x):
        new = (before if side == "eos" else here) == MARK
        positions.append(0 if new else positions[-1] + 1)
        documents.append(documents[-1] + new)
    return positions, documents


@pytest.mark.parametrize("side", ["eos", "bos"])
@pytest.mark.parametrize(
    ("token", "dtype"), [("uint16", torch.int32), ("uint16", torch.int64), ("uint32", torch.int64)]
)
def test_positions_and_documents(tmp_path: Path, side: str, token: str, dtype: torch.dtype) -> None:
    tokens = write_tokens(tmp_path / "t", 1000, token)
    write_tokens(tmp_path / "u", 90, token)
    options: Any = {side: MARK, "token_dtype": token, "dtype": dtype, "stride": 7}

    def make() -> tuple[Any, dict[str, Any]]:
        data = TokenDataset([tmp_path / "t", tmp_path / "u"], 40, **options)
        return data, {"batch_size": 8, "shuffle": True}

    assert_same(make)
    dataset = make()[0]
    for i in (0, 1, 50):
        x, y, positions, documents = sample = dataset[i]
        assert type(sample) is TokenWindow
        assert x.tolist() == tokens[7 * i : 7 * i + 40]
        assert y.tolist() == tokens[7 * i + 1 : 7 * i + 41]
        assert (positions.tolist(), documents.tolist()) == divided(x.tolist(), side)
        assert {part.dtype for part in sample} == {dtype}
    batch = next(iter(DataLoader(dataset, 3)))
    assert type(batch) is TokenWindow
    assert pickle.loads(pickle.dumps(dataset))[3].document_ids.equal(dataset[3].document_ids)
    assert_same(lambda: (Subset(ConcatDataset([dataset, dataset]), [3, 150]), {"batch_size": 2}))


def test_other_marks_do_not_mix(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", 100)
    parts = [TokenDataset(tmp_path / "t", 10, eos=mark) for mark in (5, 6)]
    assert DataLoader(ConcatDataset(parts)).path == "torch"
    assert_same(lambda: (ConcatDataset(parts), {"batch_size": 4}), path="torch")


def test_attention_stays_within_documents(tmp_path: Path) -> None:
    """The mask of the ids, and the pieces of cu_seqlens one by one, give the same attention."""
    write_tokens(tmp_path / "t", 200)
    batch = next(iter(DataLoader(TokenDataset(tmp_path / "t", 32, eos=MARK), 4)))
    ends, longest = cu_seqlens(batch.position_ids)
    assert (ends.dtype, int(ends[0]), int(ends[-1])) == (torch.int32, 0, 128)
    assert longest == int(batch.position_ids.max()) + 1
    q, k, v = torch.randn(3, 4, 32, 8)
    same = batch.document_ids[:, :, None] == batch.document_ids[:, None, :]
    want = scaled_dot_product_attention(q, k, v, attn_mask=same & torch.ones(32, 32).tril().bool())
    pieces = [
        scaled_dot_product_attention(
            *(t.reshape(128, 8)[None, a:b] for t in (q, k, v)), is_causal=True
        )
        for a, b in itertools.pairwise(ends)
    ]
    torch.testing.assert_close(torch.cat(pieces, 1).view(4, 32, 8), want)


@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_files_of_any_content(tmp_path: Path, data: Any) -> None:
    """A clear error that names the file, or windows of exactly what is in it."""
    is_npy = data.draw(st.booleans(), "npy")
    path = tmp_path / ("t.npy" if is_npy else "t.bin")
    if is_npy:
        kind = data.draw(st.sampled_from(["<u2", "<u4", ">u2", "<i2", "<f4"]))
        np.save(path, np.arange(data.draw(st.integers(0, 30)), dtype=kind))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 2), "flips")):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        content = content[: data.draw(st.integers(0, len(content)), "end")]
    else:
        content = bytearray(data.draw(st.binary(max_size=90)))
    path.write_bytes(content)
    try:
        dataset = TokenDataset(path, 4, stride=data.draw(st.integers(1, 9)), eos=3)
    except ValueError as error:
        assert "TokenDataset" in str(error) or str(path) in str(error)  # noqa: PT017
        return
    tokens = np.load(path) if is_npy else np.frombuffer(bytes(content), np.uint16)
    batches = [*DataLoader(dataset, 3)]
    windows = zip(torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches]), strict=True)
    starts = range(0, len(tokens) - 4, dataset.stride)
    for start, (x, y) in zip(starts, windows, strict=True):
        assert x.tolist() == tokens[start : start + 4].tolist()
        assert y.tolist() == tokens[start + 1 : start + 5].tolist()
