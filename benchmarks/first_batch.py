"""Time to the first batch of a process: python benchmarks/first_batch.py LABEL ROUNDS.

Prints the seconds of every round as JSON. Each is measured in a process of its own, forked from
one that has imported torch and faststep and has done nothing else: where loaders ran before, the
allocator may hold memory of just the size that a batch needs, and one contender finds it there.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import faststep.data
from contenders import OURS
from loader_rows import LoaderWork, work_of

THEIRS = "torch"


def seconds_to_first(make: Callable[[], Any]) -> float:
    loader = make()
    start = time.perf_counter()
    stream = iter(loader)
    next(stream)
    return time.perf_counter() - start


def workers_of(work: LoaderWork, dataset: Any) -> int:
    """None on the array path."""
    return 0 if faststep.data.DataLoader(dataset, work.batch_size).path == "arrays" else 2


def seconds_of(work: LoaderWork, who: str, folder: Path) -> tuple[float, int]:
    """The time of one contender and its number of workers."""
    dataset = work.dataset(folder)
    workers = workers_of(work, dataset)
    if who == OURS:
        options = dict(work.options)
        return seconds_to_first(
            lambda: faststep.data.DataLoader(
                dataset, work.batch_size, True, num_workers=workers, **options
            )
        ), workers
    plain = work.plain(dataset)
    return seconds_to_first(
        lambda: DataLoader(plain, work.batch_size, True, num_workers=workers)
    ), workers


def _answer(pipe: Connection, work: LoaderWork, who: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipe.send(seconds_of(work, who, Path(folder)))


def in_a_process(work: LoaderWork, who: str) -> tuple[float, int]:
    """As seconds_of(), in a forked process; RuntimeError if that fails."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(theirs, work, who))
    process.start()
    theirs.close()
    try:
        answer: tuple[float, int] = ours.recv()
    except EOFError:
        raise RuntimeError(f"{who} gave no first batch of {work.label}") from None
    finally:
        process.join()
    return answer


def main(label: str, rounds: int) -> None:
    work = work_of(label)
    times: dict[str, list[float]] = {OURS: [], THEIRS: []}
    workers = 0
    for number in range(rounds):  # who comes second may find what the first one left
        for who in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
            seconds, workers = in_a_process(work, who)
            times[who].append(seconds)
    print(json.dumps({"seconds": times, "workers": workers}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
