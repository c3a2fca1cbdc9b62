"""Batches of the loaders of one work, in turns: python benchmarks/loaders.py LABEL FOLDER.

Prints, as JSON, the seconds per batch in each block of each contender, who is absent and why, and
the bytes of a batch. In a process of its own: the works before may leave free memory of just the
size that a batch needs, and a loader that allocates its batches is then three times as fast as in a
script that has only itself.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any, TypedDict

import torch

from bench_rows import SMOKE
from contenders import UnavailableError
from loader_rows import LoaderWork, Stream, work_of

BLOCKS = 1 if SMOKE else 5
SETTLE = 8  # batches until a loader runs evenly
ENOUGH_SECONDS = 1.0  # of a block


class Measured(TypedDict):
    """What is printed."""

    seconds: dict[str, list[float]]
    absent: dict[str, str]
    bytes: int


def bytes_of(batch: Any) -> int:
    if isinstance(batch, (tuple, list)):
        return sum(map(bytes_of, batch))
    if isinstance(batch, dict):
        return sum(map(bytes_of, batch.values()))
    return int(batch.nbytes)


def block(stream: Stream, batches: int) -> float:
    """Seconds per batch."""
    for _ in range(min(SETTLE, batches)):
        next(stream)
    start, done = time.perf_counter(), 0
    while done < batches and time.perf_counter() - start < ENOUGH_SECONDS:
        next(stream)
        done += 1
    return (time.perf_counter() - start) / done


def measured(work: LoaderWork, folder: Path) -> Measured:
    """The contenders one after another in each block, one alone at a time."""
    torch.manual_seed(0)
    seconds: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    size = 0
    streams = work.streams(work.dataset(folder))
    for _ in range(BLOCKS):
        for name, make in streams.items():
            if name in absent:
                continue
            stream = make()
            try:
                size = bytes_of(next(stream))
            except UnavailableError as reason:
                absent[name] = str(reason)
                continue
            assert size > 0
            seconds.setdefault(name, []).append(block(stream, 3 if SMOKE else work.batches))
            stream.close()  # ends workers and threads: nobody runs beside the next one
            gc.collect()
    return {"seconds": seconds, "absent": absent, "bytes": size}


def main(label: str, folder: str) -> None:
    print(json.dumps(measured(work_of(label), Path(folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
