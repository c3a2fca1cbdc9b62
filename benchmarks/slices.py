"""Loaders in slices of time, in turns: for rows that are decided by a few percent.

Each contender is a process of its own, which with its workers is stopped while another one runs.
What a minute of the machine is like is then the same for all, and nothing is lost between slices: a
sample that was in the making goes on where it was.

`python benchmarks/slices.py LABEL NAME FOLDER FILE` is such a process; it counts batches in FILE.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from loader_works import LOADER_WORKS
from works import SMOKE

__all__ = ["seconds_in_slices"]

SLICE_SECONDS = 0.06
SETTLE = 8  # batches until a loader runs evenly
COUNTER_BYTES = 8


class _Contender:
    """A process group that loads batches without end, while it is let."""

    def __init__(self, label: str, name: str, folder: Path, file: Path) -> None:
        folder.mkdir()
        file.write_bytes(bytes(COUNTER_BYTES))
        self.file = file
        self.seconds = 0.0  # that it was let
        command = [sys.executable, __file__, label, name, str(folder), str(file)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            assert self._process.stdout is not None
            if self._process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{name} could not load {label}: see its error above")
        except BaseException:
            self.end()
            raise
        self._signal(signal.SIGSTOP)
        self.before = self.count()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def count(self) -> int:
        """Batches since its start."""
        return int.from_bytes(self.file.read_bytes(), sys.byteorder)

    def run(self) -> None:
        start = time.perf_counter()
        self._signal(signal.SIGCONT)
        time.sleep(SLICE_SECONDS)
        self._signal(signal.SIGSTOP)
        self.seconds += time.perf_counter() - start

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            self._signal(signal.SIGKILL)
        self._process.communicate()


def seconds_in_slices(
    label: str, names: Sequence[str], folder: Path, seconds: float
) -> dict[str, float]:
    """Seconds per batch of each stream of a loader's work, in `seconds` of turns for all."""
    with contextlib.ExitStack() as stack:
        contenders: dict[str, _Contender] = {}
        for number, name in enumerate(names):
            data, file = folder / f"data {number}", folder / f"count {number}"
            contenders[name] = _Contender(label, name, data, file)
            stack.callback(contenders[name].end)
        for turn in _turns(list(contenders.values()), seconds):
            turn.run()
        return {name: c.seconds / max(c.count() - c.before, 1) for name, c in contenders.items()}


def _turns(contenders: list[_Contender], seconds: float) -> Iterator[_Contender]:
    """There and back, so that each comes first as often as last."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield from contenders
        yield from reversed(contenders)


def main(label: str, name: str, folder: str, file: str) -> None:
    torch.manual_seed(0)
    (work,) = (work for work in LOADER_WORKS if work.label == label)
    stream = work.streams(work.dataset(Path(folder)))[name]()
    for _ in range(1 if SMOKE else SETTLE):
        next(stream)
    with Path(file).open("r+b") as opened, mmap.mmap(opened.fileno(), COUNTER_BYTES) as counter:
        print("ready", flush=True)
        for done, _ in enumerate(stream, 1):
            counter[:] = done.to_bytes(COUNTER_BYTES, sys.byteorder)


if __name__ == "__main__":
    main(*sys.argv[1:])
