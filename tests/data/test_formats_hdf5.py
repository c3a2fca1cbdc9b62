"""HDF5: contiguous arrays are mapped, all others read by h5py; forks, threads and damage."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import faststep.data
from faststep.data import ArrayDataset, DataLoader, FormatError
from faststep.data.formats import HDF5Dataset

from .torch_and_ours import assert_same, child, plain, side_by_side
from .written import times_open

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
    checked = []

    def parents() -> None:
        dataset = HDF5Dataset(tmp_path / "x")

        def read() -> None:
            for _ in range(20):
                check(dataset, data)
                checked.append(1)

        side_by_side(3, read)
        opened = dataset._handle()

        def work() -> None:
            assert dataset._handle() is not opened
            assert dataset[3]["flag"] == data["flag"][3]

        child(work)
        assert dataset._handle() is opened

    parents()
    assert times_open(tmp_path / "x") == 0  # closed with the dataset
    assert len(checked) == 60


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


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A file with arrays of its own, and some that lie elsewhere."""
    other, path = tmp_path / "other.h5", tmp_path / "linked.h5"
    rows = np.arange(12).reshape(4, 3)
    (tmp_path / "secret").write_bytes(b"root")
    with h5py.File(other, "w") as file:
        file["rows"] = rows + 100
        file["group/rows"] = rows + 200
    with h5py.File(path, "w") as file:
        file["own"] = rows
        file.create_dataset("raw", (4,), "u1", external=[(str(tmp_path / "secret"), 0, 4)])
        for name, source in {
            "of_own": h5py.VirtualSource(file["own"]),
            "of_other": h5py.VirtualSource(str(other), "rows", (4, 3)),
            "of_raw": h5py.VirtualSource(file["raw"]),
        }.items():
            layout = h5py.VirtualLayout(source.shape, source.dtype)
            layout[:] = source
            file.create_virtual_dataset(name, layout)
        file["link"] = h5py.ExternalLink(str(other), "/rows")
        file["group"] = h5py.ExternalLink(str(other), "/group")
        file["soft"] = h5py.SoftLink("/group/rows")
        file["soft_own"] = h5py.SoftLink("own")
        file["loop"] = h5py.SoftLink("/loop")
    return path


@pytest.mark.parametrize(
    ("name", "other", "value"),
    [
        ("raw", "secret' (external storage)", ord("o")),
        ("of_raw", "secret' (external storage)", ord("o")),
        ("of_other", "other.h5' (a virtual source)", [103, 104, 105]),
        ("link", "other.h5' (an external link)", [103, 104, 105]),
        ("group/rows", "other.h5' (an external link)", [203, 204, 205]),
        ("soft", "other.h5' (an external link)", [203, 204, 205]),
    ],
)
def test_other_files_are_read_only_if_asked_for(
    linked: Path, name: str, other: str, value: Any
) -> None:
    message = rf"linked\.h5: '{name}' is read from .*{re.escape(other)}.*external=True"
    with pytest.raises(FormatError, match=message):
        faststep.data.open(linked, columns=["own", name])
    with pytest.raises(FormatError, match=message):
        HDF5Dataset(linked, columns=[name])
    dataset: Any = faststep.data.open(linked, columns=[name], external=True)
    for again in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert again[1][name].tolist() == value
    assert dataset[3][name].tolist() != value


def test_arrays_of_the_file_itself_are_read(linked: Path) -> None:
    with pytest.raises(FormatError, match=r"'(of_other|of_raw|raw)' is read from"):
        faststep.data.open(linked)
    dataset: Any = faststep.data.open(linked, columns=["own", "of_own", "soft_own"])
    assert [value.tolist() for value in dataset[1].values()] == [[3, 4, 5]] * 3
    assert isinstance(faststep.data.open(linked, columns=["soft_own"]), ArrayDataset)
    with pytest.raises(FormatError, match="'loop': links lead to links without end"):
        faststep.data.open(linked, columns=["loop"])
    with pytest.raises(FormatError, match="there is no array 'own/rows'"):
        faststep.data.open(linked, columns=["own/rows"])


def test_a_file_that_comes_to_name_others(linked: Path) -> None:
    dataset = HDF5Dataset(linked, columns=["own"])
    with h5py.File(linked, "r+") as file:
        del file["own"]
        file["own"] = h5py.ExternalLink("other.h5", "/rows")
    with pytest.raises(FormatError, match=r"'own' is read from another file, 'other\.h5'"):
        dataset[0]


def test_an_array_behind_a_link_is_not_mapped_from_this_file(tmp_path: Path) -> None:
    """At the same place in this file lie other numbers, of which the ends are alike."""
    for name, middle in (("a.h5", 1), ("b.h5", 2)):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = np.array([0, middle, 0])
            if name == "a.h5":
                file["y"] = h5py.ExternalLink("b.h5", "/x")
    dataset: Any = faststep.data.open(tmp_path / "a.h5", columns=["y"], external=True)
    assert dataset[1]["y"] == 2
