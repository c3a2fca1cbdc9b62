"""Epoch after epoch on every path of the loader, and what the processes have in between.

    python -m tests.data.soak [PATH ...]

A line per path says what it had after the first epochs and at the end; the exit code is 1 if
something grew: descriptors, threads, children and files in /dev/shm at all, objects by one in each
epoch, memory by what malloc takes at a time.
"""

import contextlib
import gc
import itertools
import os
import sys
import tempfile
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
ROW = 16384  # bytes: a batch of 128 kB that is lost in each of 36 epochs is 4600 kB
WARM, LAST = 15, 51  # epochs, of which every third is left early
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

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((ROW,), index % 256, dtype=torch.uint8), "text": str(index)}


def arrays(folder: Path) -> Dataset[Any]:
    return TensorDataset(torch.zeros(BATCH * BATCHES, ROW, dtype=torch.uint8))


def made(folder: Path) -> Dataset[Any]:
    return Made()


def chunks(folder: Path) -> Dataset[Any]:
    import h5py

    with h5py.File(folder / "x", "w") as file:
        data = np.zeros((BATCH * BATCHES, ROW), np.uint8)
        file.create_dataset("x", data=data, chunks=(1, ROW), compression="gzip")
    return HDF5Dataset(folder / "x")


def images(folder: Path) -> Dataset[Any]:
    import PIL.Image

    (folder / "class").mkdir()
    side = int((ROW / 3) ** 0.5)
    for i in range(BATCH * BATCHES):
        pixels = np.full((side, side, 3), i, np.uint8)
        PIL.Image.fromarray(pixels).save(folder / "class" / f"{i}.jpg")
    return ImageFolder(folder, memory_format=torch.channels_last)


Make = Callable[[Path], Dataset[Any]]
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


def epochs(name: str, folder: Path) -> Generator[int, None, None]:
    """Goes through an epoch for each number; the second of three is left early.

    A batch is kept until the next epoch is over, and changed.
    """
    make, options = PATHS[name]
    loader: DataLoader[Any] = DataLoader(make(folder), BATCH, shuffle=True, **options)
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


def _soak(name: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        running = epochs(name, Path(folder))
        for number in running:
            if number == WARM:
                first = usage()
            if number == LAST:
                break
        last = usage()  # of a loader that goes on
        running.close()
    faults = grown(first, last, LAST - WARM - 1, MALLOC)
    faults += grown(last, usage(), 0, MALLOC)
    children = usage().children
    faults += [f"children: {children} after the end"] * bool(children)
    print(f"{name}: {tuple(first)}, at the end {tuple(last)} {faults or ''}")
    return faults


def main(names: Sequence[str]) -> int:
    print(", ".join(Usage._fields))
    return int(bool([name for name in names or PATHS if _soak(name)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
