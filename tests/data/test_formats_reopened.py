"""Files that are opened again, by other processes and threads: unchanged, or with a clear error."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import faststep.data
from faststep.data import ArrayDataset, DataLoader, FormatError, TokenDataset, convert
from faststep.data.formats import ArrowDataset, HDF5Dataset, LMDBDataset, ParquetDataset

from .torch_and_ours import child, side_by_side
from .written import WRITERS, rows, times_open

for module in ("h5py", "lmdb", "pyarrow", "safetensors"):
    pytest.importorskip(module)


def converted(path: Path, rows: Any) -> None:
    convert(ArrayDataset(rows), path, force=True)


def ragged(path: Path, rows: Any) -> None:
    samples: list[Any] = [
        "a" * i if rows.dtype == np.int32 else torch.ones(i) for i in range(len(rows))
    ]
    convert(samples, path, force=True)  # type: ignore[arg-type]


NAMES = ("npy", "safetensors", "hdf5", "chunks", "parquet", "arrow", "texts")


@pytest.mark.parametrize("write", [*(WRITERS[name] for name in NAMES), converted, ragged])
@pytest.mark.parametrize(("count", "kind"), [(5, np.int32), (23, np.int32), (20, np.float64)])
def test_a_file_that_changed(
    tmp_path: Path, write: Callable[..., None], count: int, kind: Any
) -> None:
    """As a worker that is spawned opens it: of another length, or of other types."""
    path = tmp_path / "ä file"
    write(path, rows(20, np.int32))
    pickled = pickle.dumps(faststep.data.open(path))
    assert len(pickle.loads(pickled)) == 20
    write(path, rows(count, kind))
    with pytest.raises(FormatError, match=r"ä file.*: "):
        pickle.loads(pickled)[3]
    write(path, rows(20, np.int32))
    pickle.loads(pickled)[19]


def test_token_files_that_changed(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "x.bin")
    pickled = pickle.dumps(TokenDataset(tmp_path / "x.bin", 9))
    assert len(pickle.loads(pickled)) == 11
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"x\.bin: the files are not what they were"):
        pickle.loads(pickled)


@pytest.mark.parametrize("kind", ["chunks", "parquet", "json"])
def test_nothing_stays_open(tmp_path: Path, kind: str) -> None:
    """Until a record is read; then for each thread, as long as it lives."""
    path = tmp_path / "x"
    WRITERS[kind](path, rows(20))
    dataset: Any = faststep.data.open(path)
    assert times_open(path) == 0
    dataset[3]
    counts = []

    def read() -> None:
        dataset[5]
        counts.append(times_open(path))

    for _ in range(3):
        side_by_side(1, read)
    assert counts == [1 + dataset.per_thread] * 3
    assert times_open(path) == 1

    def work() -> None:
        before = times_open(path)
        assert dataset[7]["x"] if kind == "json" else dataset[7]["x"].tolist() == [14, 15]
        # HDF5 finds that its parent has the file open, and reads at places of that descriptor.
        assert times_open(path) == before + (kind != "chunks")

    child(work)
    dataset.close()
    assert times_open(path) == 0


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        (HDF5Dataset, "chunks"),
        (ParquetDataset, "parquet"),
        (ArrowDataset, "arrow"),
        (LMDBDataset, "lmdb"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_subclass_makes_its_own_samples(
    tmp_path: Path, base: Any, kind: str, workers: int
) -> None:
    WRITERS[kind](tmp_path / "x", rows(20))

    class Numbered(base):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return index, super().__getitem__(index)

    loader = DataLoader(
        Numbered(tmp_path / "x"), 4, collate_fn=lambda samples: samples, num_workers=workers
    )
    numbers = [number for batch in loader for number, _ in batch]
    assert numbers == list(range(20))
