"""Files of every format with the same rows, as field "x" or alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from . import test_formats_archives, test_formats_tfrecord


def rows(count: int, kind: Any = np.int64, first: int = 0) -> Any:
    return np.arange(first, first + count * 2).reshape(count, 2).astype(kind)


def times_open(path: Path) -> int:
    """How many descriptors this process has of a file."""
    places = [*Path("/proc/self/fd").iterdir()]
    return sum(place.exists() and place.resolve() == path.resolve() for place in places)


def npy(path: Path, rows: Any) -> None:
    with open(path, "wb") as file:
        np.save(file, rows)


def npz(path: Path, rows: Any) -> None:
    with open(path, "wb") as file:
        np.savez(file, x=rows)


def safetensors(path: Path, rows: Any) -> None:
    library = pytest.importorskip("safetensors.torch")
    library.save_file({"x": torch.from_numpy(rows)}, path)


def hdf5(path: Path, rows: Any, chunks: bool | None = None) -> None:
    with pytest.importorskip("h5py").File(path, "w") as file:
        file.create_dataset("x", data=rows, chunks=chunks)


def chunks(path: Path, rows: Any) -> None:
    hdf5(path, rows, True)


def table(rows: Any, **more: Any) -> Any:
    arrow = pytest.importorskip("pyarrow")
    lists = arrow.FixedSizeListArray.from_arrays(arrow.array(rows.reshape(-1)), 2)
    return arrow.table({"x": lists, **more})


def parquet(path: Path, rows: Any) -> None:
    pytest.importorskip("pyarrow.parquet").write_table(table(rows), path, row_group_size=4)


def arrow(path: Path, rows: Any, **more: Any) -> None:
    data = table(rows, **more)
    with pytest.importorskip("pyarrow").ipc.new_file(path, data.schema) as file:
        file.write_table(data, max_chunksize=4)


def texts(path: Path, rows: Any) -> None:
    """Arrow that is not mapped."""
    arrow(path, rows, text=["a"] * len(rows))


def lmdb(path: Path, rows: Any) -> None:
    library = pytest.importorskip("lmdb")
    with library.open(str(path)) as environment, environment.begin(write=True) as put:
        for i, row in enumerate(rows):
            put.put(b"%02d" % i, row.tobytes())


def tfrecord(path: Path, rows: Any) -> None:
    values = [{"x": torch.from_numpy(row)} for row in rows]
    test_formats_tfrecord.write(path, [test_formats_tfrecord.example(value) for value in values])


def tar(path: Path, rows: Any) -> None:
    files = {f"{i}.npy": test_formats_archives.npy(row) for i, row in enumerate(rows)}
    test_formats_archives.write(path, files)


def zips(path: Path, rows: Any) -> None:
    files = {f"{i}.json": json.dumps(row).encode() for i, row in enumerate(rows.tolist())}
    test_formats_archives.write_zip(path, files)


def json_lines(path: Path, rows: Any) -> None:
    path.write_text("".join(json.dumps({"x": row}) + "\n" for row in rows.tolist()))


WRITERS: dict[str, Callable[[Path, Any], None]] = {
    function.__name__: function
    for function in (npy, npz, safetensors, hdf5, chunks, parquet, arrow, texts, lmdb, tfrecord)
} | {"tar": tar, "zip": zips, "json": json_lines}
FIELDS = {"npy": None, "lmdb": None, "tar": "npy", "zip": "json"}  # where it is not "x"
