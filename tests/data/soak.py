"""Epoch after epoch on every path of the loader, and what the processes have in between.

    python -m tests.data.soak                                  # two minutes, real sizes
    python -m tests.data.soak --seconds 600 --row 4194304

Each path gets its share of the time, of which the first quarter is to warm up. A line per path
says what it had then and at the end; the exit code is 1 if something grew: descriptors, threads,
children and files in /dev/shm at all, objects by one in each epoch, memory by a batch or what
malloc takes at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from faststep.data import DataLoader
from faststep.data.formats import HDF5Dataset, ImageFolder

BATCH = 8
BATCHES = 6  # per epoch
WARM = 15  # epochs at least
MALLOC = 3000  # kilobytes; up to 2000 it takes at a time


class Usage(NamedTuple):
    """What this process and its children have."""

    descriptors: int
    threads: int
    children: int
    named: int  # files of theirs in /dev/shm
    objects: int  # that Python's garbage collector knows
    kilobytes: int  # of memory that is no file: the parts of shared pages add up to one


def _children() -> list[int]:
    pids: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            pids += map(int, (thread / "children").read_text().split())
    return pids


def _kilobytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    parts = (line.split() for line in lines)
    return sum(int(part[1]) for part in parts if part[0] in ("Pss_Anon:", "Pss_Shmem:"))


def usage() -> Usage:
    """What there is now, when what nobody needs is gone."""
    gc.collect()
    pids = [os.getpid(), *_children()]
    return Usage(
        sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
        len(pids) - 1,
        sum(any(f"_{pid}_" in name for pid in pids) for name in os.listdir("/dev/shm")),
        len(gc.get_objects()),
        sum(map(_kilobytes, pids)),
    )


def grown(first: Usage, last: Usage, objects: int, kilobytes: int) -> list[str]:
    """What `last` has more of: of objects and memory, more than a little."""
    allowed = Usage(0, 0, 0, 0, objects, kilobytes)
    return [
        f"{name}: {a} and then {b}"
        for name, a, b, more in zip(Usage._fields, first, last, allowed, strict=True)
        if b > a + more
    ]


class Made(Dataset[Any]):
    """Samples that Python makes."""

    def __init__(self, row: int) -> None:
        self.row = row

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((self.row,), index % 256, dtype=torch.uint8), "text": str(index)}


def arrays(row: int, folder: Path) -> Dataset[Any]:
    return TensorDataset(torch.zeros(BATCH * BATCHES, row, dtype=torch.uint8))


def made(row: int, folder: Path) -> Dataset[Any]:
    return Made(row)


def chunks(row: int, folder: Path) -> Dataset[Any]:
    import h5py

    with h5py.File(folder / "x", "w") as file:
        data = np.zeros((BATCH * BATCHES, row), np.uint8)
        file.create_dataset("x", data=data, chunks=(1, row), compression="gzip")
    return HDF5Dataset(folder / "x")


def images(row: int, folder: Path) -> Dataset[Any]:
    import PIL.Image

    (folder / "class").mkdir()
    side = int((row / 3) ** 0.5)
    for i in range(BATCH * BATCHES):
        pixels = np.full((side, side, 3), i, np.uint8)
        PIL.Image.fromarray(pixels).save(folder / "class" / f"{i}.jpg")
    return ImageFolder(folder, memory_format=torch.channels_last)


Make = Callable[[int, Path], Dataset[Any]]
Stop = Callable[[int, float], bool]  # by the number of the epoch, and the seconds so far
WORKERS: dict[str, Any] = {"num_workers": 1}
PATHS: dict[str, tuple[Make, dict[str, Any]]] = {
    "arrays": (arrays, {"num_workers": 2}),
    "arrays, device": (arrays, {"device": "cpu"}),
    "workers": (made, WORKERS),
    "workers, persistent": (made, WORKERS | {"persistent_workers": True}),
    "workers, device": (made, WORKERS | {"persistent_workers": True, "device": "cpu"}),
    "threads": (made, WORKERS | {"worker_method": "thread"}),
    "threads, HDF5": (chunks, WORKERS | {"worker_method": "thread"}),
    "images": (images, {}),
    "images, workers": (images, WORKERS | {"persistent_workers": True}),
}


def epochs(name: str, row: int, folder: Path) -> Generator[int, None, None]:
    """Goes through an epoch for each number; the second of three is left early.

    A batch is kept until the next epoch is over, and changed.
    """
    make, options = PATHS[name]
    loader: DataLoader[Any] = DataLoader(make(row, folder), BATCH, shuffle=True, **options)
    kept: Any = None
    for number in itertools.count():
        batches = 0
        for batch in loader:
            batches += 1
            if batches == 2:
                latest = batch
                if number % 3 == 1:
                    break
        assert batches == (2 if number % 3 == 1 else BATCHES)
        tensor = next(iter(latest.values())) if isinstance(latest, dict) else latest[0]
        tensor.add_(1)
        kept, latest = latest, None
        del batch, tensor
        yield number
    del kept


def _soak(name: str, row: int, is_warm: Stop, is_over: Stop) -> list[str]:
    start, first = time.monotonic(), None
    with tempfile.TemporaryDirectory() as folder:
        running = epochs(name, row, Path(folder))
        for number in running:
            spent = time.monotonic() - start
            if number % 3 or number < WARM:
                continue  # in another state
            if first is None and is_warm(number, spent):
                first, warm = usage(), number
            elif first is not None and is_over(number, spent):
                break
        assert first is not None
        last = usage()  # of a loader that goes on
        running.close()
    faults = grown(first, last, number - warm - 1, max(MALLOC, BATCH * row >> 10))
    faults += grown(last, usage(), 0, MALLOC)
    children = usage().children
    faults += [f"children: {children} after the end"] * bool(children)
    print(f"{name}: {warm} epochs {tuple(first)}, {number} epochs {tuple(last)} {faults or ''}")
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of all paths")
    parser.add_argument("--epochs", type=int, help="of each path, instead; a multiple of three")
    parser.add_argument("--row", type=int, default=3 << 18, help="bytes of a sample")
    parser.add_argument("--path", action="append", choices=PATHS, help="only this one")
    chosen = parser.parse_args(arguments)
    names = chosen.path or [*PATHS]
    share = chosen.seconds / len(names)
    print(", ".join(Usage._fields))
    last = chosen.epochs

    def is_warm(number: int, seconds: float) -> bool:
        return last is not None or seconds > share / 4

    def is_over(number: int, seconds: float) -> bool:
        return number >= last if last is not None else seconds > share

    failed = [name for name in names if _soak(name, chosen.row, is_warm, is_over)]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
