"""LMDB: all records, forks while it is open, several datasets of one path, and damage."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

import faststep.data
from faststep.data import DataLoader, FormatError
from faststep.data.formats import LMDBDataset

from .torch_and_ours import child

lmdb = pytest.importorskip("lmdb")
RECORDS = {b"%04d" % i: bytes([i % 256]) * (i % 300) for i in range(500)}


def write(path: Path, **options: Any) -> Path:
    with (
        lmdb.open(str(path), map_size=1 << 24, **options) as environment,
        environment.begin(write=True) as transaction,
    ):
        for key, value in RECORDS.items():
            transaction.put(key, value)
    return path


@pytest.mark.parametrize("subdir", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_records(tmp_path: Path, subdir: bool, workers: int) -> None:
    """Workers start while the parent has the environment open."""
    dataset: Any = faststep.data.open(write(tmp_path / "x", subdir=subdir))
    assert isinstance(dataset, LMDBDataset)
    assert len(dataset) == len(RECORDS)
    assert dataset[7] == RECORDS[b"0007"]
    loader = DataLoader(dataset, 16, collate_fn=lambda samples: samples, num_workers=workers)
    assert [value for batch in loader for value in batch] == [*RECORDS.values()]
    assert (dataset[-1], dataset.key(-1)) == (RECORDS[b"0499"], b"0499")
    copied = pickle.loads(pickle.dumps(dataset))
    assert copied[9] == RECORDS[b"0009"]
    dataset.close()
    assert copied[9] == dataset[9]  # they share the environment
    with pytest.raises(IndexError, match="no record 500 among 500"):
        dataset[500]


def check_fork(path: Path) -> None:
    dataset = LMDBDataset(path, transform=len)
    other = LMDBDataset(path, keys=["0003", b"0001"])
    assert (dataset[200], other[0]) == (200, RECORDS[b"0003"])

    def work() -> None:
        assert (dataset[201], other[1]) == (201, RECORDS[b"0001"])

    child(work)
    assert (dataset[202], other[-1]) == (202, RECORDS[b"0001"])


def test_a_fork_opens_its_own(tmp_path: Path) -> None:
    check_fork(write(tmp_path / "x"))
    lmdb.open(str(tmp_path / "x")).close()  # refused if one were still open


def test_damage_and_wrong_keys(tmp_path: Path) -> None:
    write(tmp_path / "x")
    with pytest.raises(FormatError, match=r"x: record 1, key b'none': there is no such key"):
        LMDBDataset(tmp_path / "x", keys=["0001", "none"])[1]
    whole = (tmp_path / "x" / "data.mdb").read_bytes()
    for size in (0, 30, 150, 5000, len(whole) - 5000):
        shutil.rmtree(tmp_path / "cut", ignore_errors=True)
        (tmp_path / "cut").mkdir()
        (tmp_path / "cut" / "data.mdb").write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"cut/data.mdb: "):
            faststep.data.open(tmp_path / "cut")
    (tmp_path / "cut" / "data.mdb").write_bytes(b"\1" * 9000)
    with pytest.raises(FormatError, match=r"cut/data.mdb: this is no LMDB"):
        faststep.data.open(tmp_path / "cut")
