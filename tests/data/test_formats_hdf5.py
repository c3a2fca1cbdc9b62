"""HDF5: contiguous arrays are mapped, all others read by h5py; forks, threads and damage."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import faststep.data
from faststep.data import ArrayDataset, DataLoader, FormatError
from faststep.data.formats import HDF5Dataset

from .both import assert_same, plain

h5py = pytest.importorskip("h5py")
ROWS = 100


def write(path: Path, **options: Any) -> dict[str, Any]:
    """Arrays of several types, two in groups, and what they hold."""
    generator = np.random.default_rng(1)
    data = {
        "x": generator.standard_normal((ROWS, 3, 2), np.float32),
        "deep/er/label": generator.integers(-5, 5, ROWS),
        "deep/half": generator.standard_normal((ROWS, 4)).astype(np.float16),
        "flag": generator.integers(0, 2, ROWS).astype(bool),
    }
    with h5py.File(path, "w") as file:
        for name, array in data.items():
            file.create_dataset(name, data=array, **options)
        file["version"] = 3
    return data


def check(dataset: Any, data: dict[str, Any]) -> None:
    for i in (0, 7, -1):
        assert plain(dataset[i]) == plain({n: torch.tensor(data[n][i]) for n in sorted(data)})


def test_contiguous_arrays_are_mapped(tmp_path: Path) -> None:
    data = write(tmp_path / "x")
    dataset = faststep.data.open(tmp_path / "x")
    assert isinstance(dataset, ArrayDataset)
    check(dataset, data)
    check(pickle.loads(pickle.dumps(dataset)), data)
    assert_same(lambda: (faststep.data.open(tmp_path / "x"), {"batch_size": 8, "shuffle": True}))
    with h5py.File(tmp_path / "block", "w", userblock_size=1024) as file:
        file["x"] = data["x"]
    check(faststep.data.open(tmp_path / "block"), {"x": data["x"]})


OPTIONS = [
    {"chunks": True, "compression": "gzip"},
    {"chunks": True, "shuffle": True, "fletcher32": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("workers", [0, 2])
def test_chunks_are_read_by_h5py(tmp_path: Path, options: Any, workers: int) -> None:
    """Workers start right after the parent has opened the file, and while it is open."""
    data = write(tmp_path / "x", **options)
    dataset: Any = faststep.data.open(tmp_path / "x")
    assert isinstance(dataset, HDF5Dataset)
    check(dataset, data)
    check(pickle.loads(pickle.dumps(dataset)), data)
    order = np.random.default_rng(2).permutation(ROWS).tolist()
    loader = DataLoader(dataset, 8, sampler=order, num_workers=workers)
    batches = [*loader]
    for name, array in data.items():
        assert torch.equal(torch.cat([b[name] for b in batches]), torch.tensor(array[order]))
    check(dataset, data)
    dataset.close()
    dataset.close()
    check(dataset, data)


def test_many_at_once_in_any_order(tmp_path: Path) -> None:
    data = write(tmp_path / "x", chunks=True)
    with HDF5Dataset(tmp_path / "x", columns=["x"]) as dataset:
        for places in ([], [5], [99, 0, 0, -1, 50, 51, 52, 3], list(range(ROWS))):
            got = [sample["x"] for sample in dataset.__getitems__(places)]
            assert plain(got) == plain([torch.tensor(data["x"][i]) for i in places])
        with pytest.raises(IndexError, match="no record 100 among 100"):
            dataset.__getitems__([3, 100])


def test_texts_lists_and_byte_orders(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x", "w") as file:
        file["text"] = ["a", "ö", ""]
        file["big"] = np.arange(3, dtype=">i4")
        lists = file.create_dataset("tokens", 3, h5py.vlen_dtype(np.int32))
        for i in range(3):
            lists[i] = np.arange(i)
    dataset: Any = faststep.data.open(tmp_path / "x", transform=lambda s: {**s, "more": 1})
    assert plain(dataset[1]) == plain(
        {
            "big": torch.tensor(1, dtype=torch.int32),
            "text": "ö",
            "tokens": torch.arange(1, dtype=torch.int32),
            "more": 1,
        }
    )


def test_threads_and_forks_have_their_own(tmp_path: Path) -> None:
    data = write(tmp_path / "x", chunks=True)
    dataset = HDF5Dataset(tmp_path / "x")
    errors: list[BaseException] = []

    def read(dataset: Any) -> None:
        try:
            for _ in range(20):
                check(dataset, data)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(dataset,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    del threads
    parents = dataset._handle()
    child = os.fork()
    if not child:
        mine = dataset._handle()
        os._exit(0 if mine is not parents and dataset[3]["flag"] == data["flag"][3] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert dataset._handle() is parents
    del dataset
    assert not parents  # closed with it


def test_damage_and_wrong_columns(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x", "w") as file:
        file.create_dataset("x", data=np.arange(100.0), chunks=(10,), fletcher32=True)
        place = file["x"].id.get_chunk_info(4).byte_offset
        file["short"] = np.zeros(3)
        file["struct"] = np.zeros(100, [("a", "i4")])
    for columns, message in (
        (None, "'struct' has the type .*columns="),
        (["x", "short"], "'short' has 3 rows, 'x' has 100.*columns="),
        (["none"], "no array 'none'"),
        (["struct"], "'struct' has the type .*columns="),
        ([], "no array in it"),
    ):
        with pytest.raises(FormatError, match=rf"x: .*{message}"):
            HDF5Dataset(tmp_path / "x", columns=columns)
    whole = (tmp_path / "x").read_bytes()
    damaged = bytearray(whole)
    damaged[place + 3] ^= 1
    (tmp_path / "bad").write_bytes(damaged)
    dataset = HDF5Dataset(tmp_path / "bad", columns=["x"])
    assert dataset[50]["x"] == 50
    with pytest.raises(FormatError, match=r"bad: 'x', record 41: "):
        dataset[41]
    with pytest.raises(FormatError, match=r"bad: 'x', records 40 to 42: "):
        next(iter(DataLoader(dataset, 3, sampler=[42, 40, 41])))
    for size in (20, 700, len(whole) // 2):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"cut: "):
            faststep.data.open(tmp_path / "cut")
    with pytest.raises(FileNotFoundError):
        HDF5Dataset(tmp_path / "none")
