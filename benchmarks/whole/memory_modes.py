"""Whole steps with memory that stays, against plain torch: one process per run, in turns.

    python benchmarks/whole/memory_modes.py                        # a table
    python benchmarks/whole/memory_modes.py --tcmalloc libtcmalloc_minimal.so.4
    python benchmarks/whole/memory_modes.py CNN retain             # one run, as JSON

A step is forward, backward, torch's fused AdamW and zero_grad(), on two threads. Page faults are
those of getrusage(), the peak is VmHWM, and the time of a step is the least of the medians of all
runs of its kind.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from works import WORKS

import faststep
from faststep.cli.console import table

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
WARM_UP = 4
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
PLAIN = "plain"
# A mode is a name, and what the environment of its process has more.
MODES: dict[str, dict[str, str]] = {
    PLAIN: {},
    "retain": {},
    "run": {"FASTSTEP_RETAIN": "1"},
    "mallopt": {},
    "mallopt, huge pages": HUGE,
    "THP_MEM_ALLOC_ENABLE": {"THP_MEM_ALLOC_ENABLE": "1"},
}


class Run(NamedTuple):
    """Of one process: seconds and page faults of a step, and bytes at the peak."""

    seconds: float
    faults: float
    peak: int
    loss: float


def peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell the peak of resident memory")


def begin(mode: str) -> None:
    """What the mode does in a process that runs."""
    if mode.startswith("mallopt"):
        mallopt = ctypes.CDLL(None).mallopt
        values = {M_MMAP_THRESHOLD: 2**31 - 1, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 << 20}
        assert all(mallopt(name, value) for name, value in values.items())
    elif mode == "retain":
        faststep.memory.retain()


def measured(work_name: str, mode: str, steps: int) -> Run:
    """Of this process."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    begin(mode)
    work = WORKS[work_name]()
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4, fused=True)
    seconds = []
    before = 0
    value = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        loss = work.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        seconds.append(time.perf_counter() - start)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return Run(statistics.median(seconds[WARM_UP:]), faults / steps, peak(), value)


def in_a_process(work: str, mode: str, steps: int, more: dict[str, str]) -> Run:
    command = [sys.executable, __file__, work, mode, "--steps", str(steps)]
    environment = {**os.environ, **more}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{work}, {mode}: {done.stderr}")
    return Run(*json.loads(done.stdout))


def best_of(runs: list[Run]) -> Run:
    """The least time, the median of the page faults, and the highest peak."""
    faults = statistics.median(run.faults for run in runs)
    return Run(min(r.seconds for r in runs), faults, max(r.peak for r in runs), runs[0].loss)


def compare(works: list[str], modes: dict[str, dict[str, str]], rounds: int, steps: int) -> str:
    """A table, one row per work and mode."""
    rows = []
    for work in works:
        runs: dict[str, list[Run]] = {mode: [] for mode in modes}
        for _ in range(rounds):
            for mode, more in modes.items():
                runs[mode].append(in_a_process(work, mode, steps, more))
        best = {mode: best_of(found) for mode, found in runs.items()}
        plain = best[PLAIN]
        for mode, run in best.items():
            assert run.loss == plain.loss, f"{work}, {mode}: the loss is {run.loss}"
            rows.append(
                [
                    f"{work}: {mode}",
                    f"{1e3 * run.seconds:.0f}",
                    f"{plain.seconds / run.seconds:.2f}x",
                    f"{run.faults:.0f}",
                    f"{100 * run.faults / plain.faults:.1f} %",
                    f"{run.peak / 2**20:.0f}",
                    f"{run.peak / plain.peak:.2f}x",
                ]
            )
    header = ["step", "ms", "faster", "page faults", "of plain's", "peak MiB", "of plain's"]
    return table(header, rows, markdown=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", nargs="?", choices=WORKS)
    parser.add_argument("mode", nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tcmalloc", metavar="LIBRARY", help="preloaded, as a rival")
    parser.add_argument("--modes", nargs="*", default=[PLAIN, "retain"], choices=MODES)
    options = parser.parse_args()
    if options.mode is not None:
        print(json.dumps(measured(options.work, options.mode, options.steps)))
        return
    modes = {PLAIN: {}} | {mode: MODES[mode] for mode in options.modes}
    if options.tcmalloc:
        modes["tcmalloc"] = {"LD_PRELOAD": options.tcmalloc}
    works = [options.work] if options.work else list(WORKS)
    print(compare(works, modes, options.rounds, options.steps))


if __name__ == "__main__":
    main()
