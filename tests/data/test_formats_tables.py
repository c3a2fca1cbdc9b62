"""Parquet and Arrow: types, groups, many at once, missing values and damage."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset

import faststep.data
from faststep.data import ArrayDataset, DataLoader, FormatError
from faststep.data.formats import ArrowDataset, ParquetDataset

from .torch_and_ours import assert_same, plain

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
ROWS = 50


def fixed(rows: int = ROWS) -> Any:
    """Numbers and nested lists of a fixed length."""
    numbers = np.random.default_rng(0).standard_normal(rows * 6).astype(np.float32)
    inner = pa.FixedSizeListArray.from_arrays(pa.array(numbers), 3)
    return pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(inner, 2),
            "label": pa.array(range(rows), pa.uint16()),
            "flag": pa.array(np.arange(rows, dtype=np.int8)),
        }
    )


def mixed() -> Any:
    texts = ["ä" * (i % 4) for i in range(ROWS)]
    return pa.table(
        {
            "tokens": pa.array([list(range(1 + i % 5)) for i in range(ROWS)], pa.list_(pa.int32())),
            "text": texts,
            "category": pa.array(texts).dictionary_encode(),
            "image": [{"bytes": bytes(i % 7), "size": [i, i]} for i in range(ROWS)],
            "flag": [i % 3 == 0 for i in range(ROWS)],
        }
    )


def want(i: int) -> dict[str, Any]:
    text = "ä" * (i % 4)
    return {
        "tokens": torch.arange(1 + i % 5, dtype=torch.int32),
        "text": text,
        "category": text,
        "image": {"bytes": bytes(i % 7), "size": torch.tensor([i, i])},
        "flag": torch.tensor(i % 3 == 0),
    }


def write(table: Any, path: Path, kind: str, **options: Any) -> Path:
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=7, **options)
        return path
    make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
    with make(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as file:
        file.write_table(table, max_chunksize=7)
    return path


@pytest.mark.parametrize("kind", ["arrow", "stream"])
def test_fixed_columns_of_arrow_are_mapped(tmp_path: Path, kind: str) -> None:
    table = fixed()
    path = write(table, tmp_path / "x", kind)
    dataset: Any = faststep.data.open(path)
    assert isinstance(dataset, ConcatDataset)
    assert all(isinstance(part, ArrayDataset) for part in dataset.datasets)
    x = torch.tensor(table["x"].to_pylist())
    assert torch.equal(dataset[33]["x"], x[33])
    assert dataset[33]["label"].dtype == torch.uint16
    assert_same(lambda: (faststep.data.open(path), {"batch_size": 8, "shuffle": True}))
    copied = pickle.loads(pickle.dumps(dataset))
    assert plain(copied[49]) == plain(dataset[49])
    packed = faststep.data.open(write(table, tmp_path / "packed", kind, compression="lz4"))
    assert isinstance(packed, ArrowDataset)
    assert plain(packed[40]) == plain(dataset[40])


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_all_types(tmp_path: Path, kind: str, workers: int) -> None:
    dataset: Any = faststep.data.open(write(mixed(), tmp_path / "x", kind))
    assert len(dataset) == ROWS
    assert plain(dataset[11]) == plain(want(11))
    order = np.random.default_rng(1).permutation(ROWS).tolist()
    loader = DataLoader(
        dataset, 8, sampler=order, collate_fn=lambda samples: samples, num_workers=workers
    )
    got = [sample for batch in loader for sample in batch]
    assert plain(got) == plain([want(i) for i in order])
    assert plain(pickle.loads(pickle.dumps(dataset))[-1]) == plain(want(ROWS - 1))
    dataset.close()
    assert plain(dataset.__getitems__([0, 0, -1])) == plain([want(0), want(0), want(ROWS - 1)])
    with pytest.raises(IndexError, match="no record 50"):
        dataset[50]


def test_several_parquet_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(3):
        table = pa.table({"label": np.arange(10) + 10 * i, "other": ["a"] * 10})
        pq.write_table(table, tmp_path / f"{i}.parquet", row_group_size=4)
    dataset: Any = faststep.data.open(tmp_path, columns=["label"], transform=lambda s: s["label"])
    reads: list[int] = []
    read = ParquetDataset._read_group
    monkeypatch.setattr(
        ParquetDataset,
        "_read_group",
        lambda self, handle, group: reads.append(group) or read(self, handle, group),
    )
    order = [29, 0, 15, 3, 28, 1, 14, 2]
    assert [int(x) for x in dataset.__getitems__(order)] == order
    assert sorted(reads) == [0, 4, 8]
    pq.write_table(pa.table({"label": [1.0]}), tmp_path / "3.parquet")
    with pytest.raises(FormatError, match=r"3.parquet has other columns than .*0.parquet"):
        ParquetDataset(tmp_path / "*.parquet", columns=["label"])


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_missing_values_are_named(tmp_path: Path, kind: str) -> None:
    numbers = pa.array([[1], [2, None]] + [[3]] * 8)
    pairs = pa.array([None, [1, None]] + [[3, 4]] * 8, pa.list_(pa.int64(), 2))
    table = pa.table({"a": [None if i == 9 else i for i in range(10)], "b": numbers, "c": pairs})
    dataset: Any = faststep.data.open(write(table, tmp_path / "x", kind), columns=["a"])
    assert plain(dataset[8]) == plain({"a": torch.tensor(8)})
    group = "row group" if kind == "parquet" else "record batch"
    with pytest.raises(FormatError, match=rf"x: {group} 1, record 2: column 'a': .*missing"):
        dataset[9]
    with pytest.raises(FormatError, match=rf"x: {group} 0, record 1: column 'b': .*missing"):
        faststep.data.open(tmp_path / "x", columns=["b"])[1]
    pairs = faststep.data.open(tmp_path / "x", columns=["c"])
    assert plain(pairs[9]) == plain({"c": torch.tensor([3, 4])})
    for row in (0, 1):
        with pytest.raises(FormatError, match=rf"x: {group} 0, record {row}: column 'c': .*miss"):
            pairs[row]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_damage_and_wrong_columns(tmp_path: Path, kind: str) -> None:
    path = write(mixed(), tmp_path / "x", kind)
    with pytest.raises(FormatError, match="x: there is not one column 'none' among"):
        faststep.data.open(path, columns=["none"])
    with pytest.raises(FormatError, match="x: there is no column"):
        faststep.data.open(path, columns=[])
    dates = pa.table({"when": pa.array([1, 2], pa.timestamp("s"))})
    with pytest.raises(FormatError, match=r"dates: column 'when' has the type timestamp"):
        faststep.data.open(write(dates, tmp_path / "dates", kind))
    whole = path.read_bytes()
    for size in (12, len(whole) // 3, len(whole) - 9):
        (tmp_path / "cut").write_bytes(whole[:size])
        if (kind, size) == ("stream", len(whole) - 9):
            continue  # only the mark of the end is missing
        with pytest.raises(FormatError, match=r"cut: "):
            faststep.data.open(tmp_path / "cut")


def test_damaged_pages_are_named(tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(1000)})
    path = tmp_path / "x"
    pq.write_table(table, path, row_group_size=500, write_page_checksum=True, use_dictionary=False)
    place = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    damaged = bytearray(path.read_bytes())
    damaged[place + 200] ^= 1
    path.write_bytes(damaged)
    dataset: Any = faststep.data.open(path)
    assert int(dataset[499]["x"]) == 499
    with pytest.raises(FormatError, match=r"x: row group 1: .*"):
        dataset[500]


def test_damaged_offsets_of_arrow_are_found(tmp_path: Path) -> None:
    path = write(pa.table({"t": [[1, 2], [3]]}), tmp_path / "x", "arrow")
    offsets = np.array([0, 2, 3], np.int32).tobytes()
    data = path.read_bytes()
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, np.array([0, 2, 1 << 30], np.int32).tobytes()))
    dataset: Any = faststep.data.open(path)
    with pytest.raises(FormatError, match=r"x: record batch 0: "):
        dataset[1]
