"""Files that are opened again, by other processes and threads: unchanged, or with a clear error."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import faststep.data
from faststep.data import ArrayDataset, DataLoader, FormatError, TokenDataset, convert
from faststep.data.formats import ArrowDataset, HDF5Dataset, LMDBDataset, ParquetDataset

h5py = pytest.importorskip("h5py")
lmdb = pytest.importorskip("lmdb")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
safetensors_torch = pytest.importorskip("safetensors.torch")


def rows(count: int, kind: Any) -> Any:
    return np.arange(count * 2).reshape(count, 2).astype(kind)


def npy(path: Path, count: int, kind: Any) -> None:
    with open(path, "wb") as file:
        np.save(file, rows(count, kind))


def safetensors(path: Path, count: int, kind: Any) -> None:
    safetensors_torch.save_file({"x": torch.from_numpy(rows(count, kind))}, path)


def hdf5(path: Path, count: int, kind: Any, chunks: bool | None = None) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=rows(count, kind), chunks=chunks)


def chunked(path: Path, count: int, kind: Any) -> None:
    hdf5(path, count, kind, True)


def table(count: int, kind: Any, more: bool = False) -> Any:
    columns = {"x": pa.array(rows(count, kind)[:, 0])}
    return pa.table(columns | ({"text": ["a"] * count} if more else {}))


def parquet(path: Path, count: int, kind: Any) -> None:
    pq.write_table(table(count, kind), path, row_group_size=4)


def arrow(path: Path, count: int, kind: Any, more: bool = False) -> None:
    data = table(count, kind, more)
    with pa.ipc.new_file(path, data.schema) as file:
        file.write_table(data, max_chunksize=4)


def texts(path: Path, count: int, kind: Any) -> None:
    arrow(path, count, kind, True)


def converted(path: Path, count: int, kind: Any) -> None:
    convert(ArrayDataset(rows(count, kind)), path, force=True)


def ragged(path: Path, count: int, kind: Any) -> None:
    class Texts(torch.utils.data.Dataset[str]):
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> Any:
            return "a" * index if kind == np.int32 else torch.zeros(index)

    convert(Texts(), path, force=True)


WRITERS = [npy, safetensors, hdf5, chunked, parquet, arrow, texts, converted, ragged]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("count", "kind"), [(5, np.int32), (23, np.int32), (20, np.float64)])
def test_a_file_that_changed(
    tmp_path: Path, write: Callable[..., None], count: int, kind: Any
) -> None:
    """As a worker that is spawned opens it: of another length, or of other types."""
    path = tmp_path / "ä file"
    write(path, 20, np.int32)
    pickled = pickle.dumps(faststep.data.open(path))
    assert len(pickle.loads(pickled)) == 20
    write(path, count, kind)
    with pytest.raises(FormatError, match=r"ä file.*: "):
        pickle.loads(pickled)[3]
    write(path, 20, np.int32)
    pickle.loads(pickled)[19]


def test_token_files_that_changed(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "x.bin")
    pickled = pickle.dumps(TokenDataset(tmp_path / "x.bin", 9))
    assert len(pickle.loads(pickled)) == 11
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"x\.bin: the files are not what they were"):
        pickle.loads(pickled)


@pytest.mark.parametrize("write", [chunked, parquet, texts])
def test_nothing_stays_open(tmp_path: Path, write: Callable[..., None]) -> None:
    """Until a record is read; then for each thread, as long as it lives."""
    path = tmp_path / "x"
    write(path, 20, np.int32)
    dataset: Any = faststep.data.open(path)
    assert dataset._handles == {}
    dataset[3]
    counts = []

    def read() -> None:
        dataset[5]
        counts.append(len(dataset._handles))

    for _ in range(3):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert counts == [1 + dataset.per_thread] * 3
    assert len(dataset._handles) == 1
    child = os.fork()
    if not child:
        fine = not dataset._handles and int(dataset[7]["x"].sum()) >= 0
        os._exit(0 if fine and len(dataset._handles) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    dataset.close()
    assert dataset._handles == {}


@pytest.mark.parametrize(
    ("base", "write"),
    [(HDF5Dataset, chunked), (ParquetDataset, parquet), (ArrowDataset, arrow), (LMDBDataset, None)],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_subclass_makes_its_own_samples(
    tmp_path: Path, base: Any, write: Any, workers: int
) -> None:
    if write is not None:
        write(tmp_path / "x", 20, np.int32)
    else:
        with lmdb.open(str(tmp_path / "x")) as environment, environment.begin(write=True) as put:
            for i in range(20):
                put.put(b"%02d" % i, b"%d" % i)

    class Numbered(base):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return index, super().__getitem__(index)

    loader = DataLoader(
        Numbered(tmp_path / "x"), 4, collate_fn=lambda samples: samples, num_workers=workers
    )
    numbers = [number for batch in loader for number, _ in batch]
    assert numbers == list(range(20))
