"""Loaders in slices of time, in turns: for rows that are decided by a few percent.

Each contender is a process of its own, which with its workers is stopped while another one runs.
What a minute of the machine is like is then the same for all, and nothing is lost between slices: a
sample that was in the making goes on where it was.

`python benchmarks/time_slices.py LABEL NAME FOLDER FILE` starts such a process, which counts
batches in FILE, and ends it when its standard input ends: however the benchmark ends, nothing is
left running.
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

from bench_rows import SMOKE
from loader_rows import work_of
from loaders import SETTLE

SLICE_SECONDS = 0.06
COUNTER_BYTES = 8


class _Contender:
    """A process group that loads batches without end, while it is let."""

    def __init__(self, label: str, name: str, folder: Path, file: Path) -> None:
        folder.mkdir()
        file.write_bytes(bytes(COUNTER_BYTES))
        self.what = f"{name} could not load {label}: see its error above"
        self.file = file
        self.seconds = 0.0  # that it was let
        command = [sys.executable, __file__, label, name, str(folder), str(file)]
        self._guard = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the benchmark, which ends the guard
        )

    def settle(self) -> None:
        """Wait until it runs evenly, and stop it."""
        assert self._guard.stdout is not None
        answer = self._guard.stdout.readline()
        if not answer:
            raise RuntimeError(self.what)
        self._group = int(answer)
        os.killpg(self._group, signal.SIGSTOP)
        self.before = self.count()

    def count(self) -> int:
        """Batches since its start."""
        return int.from_bytes(self.file.read_bytes(), sys.byteorder)

    def run(self) -> None:
        start = time.perf_counter()
        os.killpg(self._group, signal.SIGCONT)
        time.sleep(SLICE_SECONDS)
        os.killpg(self._group, signal.SIGSTOP)
        self.seconds += time.perf_counter() - start

    def seconds_per_batch(self) -> float:
        """Ends it, and raises if it has ended by itself."""
        self.end()
        if self._guard.returncode:
            raise RuntimeError(self.what)
        return self.seconds / max(self.count() - self.before, 1)

    def end(self) -> None:
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        self._guard.stdin.close()
        self._guard.wait()
        self._guard.stdout.close()


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
            contenders[name].settle()
        for turn in _turns(list(contenders.values()), seconds):
            turn.run()
        return {name: one.seconds_per_batch() for name, one in contenders.items()}


def _turns(contenders: list[_Contender], seconds: float) -> Iterator[_Contender]:
    """There and back, so that each comes first as often as last."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield from contenders
        yield from reversed(contenders)


def load(label: str, name: str, folder: str, file: str) -> None:
    """Load batches and count them; says its process group when it runs evenly."""
    torch.manual_seed(0)
    work = work_of(label)
    stream = work.streams(work.dataset(Path(folder)))[name]()
    for _ in range(1 if SMOKE else SETTLE):
        next(stream)
    with Path(file).open("r+b") as opened, mmap.mmap(opened.fileno(), COUNTER_BYTES) as counter:
        print(os.getpid(), flush=True)
        for done, _ in enumerate(stream, 1):
            counter[:] = done.to_bytes(COUNTER_BYTES, sys.byteorder)


def guard(loader: int) -> bool:
    """End a loader's process group when standard input ends; whether it was loading until then."""
    os.close(1)  # what is read from there ends with the loader
    sys.stdin.read()
    loading = os.waitpid(loader, os.WNOHANG) == (0, 0)
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself, with its workers
        os.killpg(loader, signal.SIGKILL)
    return loading


def main(arguments: list[str]) -> None:
    loader = os.fork()
    if loader:
        os.setpgid(loader, loader)
        os._exit(0 if guard(loader) else 1)
    os.setpgid(0, 0)
    load(*arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
