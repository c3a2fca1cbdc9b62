"""Hardware counters of our kernels by Nsight Compute: python -m gpu.counters FILES

Runs itself under ncu, and writes FILES.csv and FILES.md: memory and issue utilisation, and what
warps wait for. Exits with 77 where ncu is missing, or counters are not for this user.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nvcc import PLACES

from .parts import SKIPPED

__all__ = ["kernel_rows", "main", "table_of"]

LIMIT = 120
REFUSED = ("ERR_NVGPUCTRPERM", "LibraryNotLoaded", "Failed to initialize the profiler")
SECTIONS = ("SpeedOfLight", "SchedulerStats", "WarpStateStats", "Occupancy", "LaunchStats")
# Headings of the table, and the counters that they show; a counter that ncu lacks is a dash.
COLUMNS = {
    "us": "gpu__time_duration.sum",
    "memory %": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "issue %": "smsp__issue_active.avg.pct",
    "warps %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "grid": "launch__grid_size",
}
STALL = "smsp__average_warps_issue_stalled_"
STALL_END = "_per_issue_active.ratio"
MOST_STALLS = 3

Row = dict[str, str]


def kernel_rows(text: str) -> list[Row]:
    """The rows of ncu's raw page as CSV; lines before the heading are the program's own."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    rows = list(csv.DictReader(lines[start:]))
    units, kernels = rows[:1], [row for row in rows if row.get("ID")]
    in_ns = any(row.get(COLUMNS["us"], "") in ("ns", "nsecond") for row in units)
    for row in kernels:
        if in_ns and row.get(COLUMNS["us"]):
            row[COLUMNS["us"]] = str(_number(row[COLUMNS["us"]]) / 1e3)
    return kernels


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _shown(text: str | None) -> str:
    try:
        return f"{_number(text or ''):.4g}"
    except ValueError:
        return text or "-"


def _stalls(row: Row) -> str:
    """What the warps of a kernel wait for most, in warps per issued instruction."""
    found = []
    for name, text in row.items():
        if name and name.startswith(STALL) and name.endswith(STALL_END):
            reason = name.removeprefix(STALL).removesuffix(STALL_END)
            if text and not reason.endswith("_not_issued"):
                found.append((_number(text), reason.replace("_", " ")))
    return ", ".join(f"{reason} {value:.3g}" for value, reason in sorted(found)[::-1][:MOST_STALLS])


def table_of(rows: Sequence[Row], labels: Sequence[str]) -> str:
    """A Markdown table, with the launches' own labels where there is one for each."""
    heads = ["kernel", "of", *COLUMNS, "warps wait for"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    known = labels if len(labels) == len(rows) else [""] * len(rows)
    for row, label in zip(rows, known, strict=True):
        cells = [row["Kernel Name"].split("(")[0], label]
        cells += [_shown(row.get(counter)) for counter in COLUMNS.values()]
        lines.append(f"| {' | '.join([*cells, _stalls(row)])} |")
    return "\n".join(lines)


def work() -> None:
    """What is profiled: steps and lists over shapes that memory bounds, a few launches each."""
    import torch

    import faststep

    def profiled(label: str, count: int) -> None:
        print(f"launch {label}\n" * count, end="", flush=True)

    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for shapes in (((1 << 26,),), ((1 << 20,),) * 16, ((1024,),) * 300):
            size = f"{len(shapes)} x {shapes[0][0]}, {name}"
            params = [torch.nn.Parameter(torch.ones(s, dtype=dtype, device="cuda")) for s in shapes]
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer = faststep.optim.AdamW(params, max_grad_norm=1.0)
            optimizer.step()
            profiled(f"AdamW, {size}", 2)
            faststep.clip_grad_norm_(params, 0.5)
            profiled(f"clip_grad_norm_, {size}", 2)
        sums = [torch.zeros(1 << 24, device="cuda")]
        faststep._C.device_accumulate(sums, [torch.ones_like(sums[0], dtype=dtype)], 1.0, False)
        profiled(f"accumulate, 1 x {1 << 24}, {name}", 1)
    torch.cuda.synchronize()


def main(files: str) -> int:
    ncu = shutil.which("ncu", path=":".join(PLACES))
    if ncu is None:
        print("ncu is missing")
        return SKIPPED
    # The clocks are left as they are: they are not ours to set.
    command = [ncu, "--clock-control", "none", "--kernel-name", "regex:^fst_", "--csv"]
    command += ["--page", "raw", *(f"--section={name}" for name in SECTIONS)]
    command += [sys.executable, "-m", "gpu.counters", "--work"]
    done = subprocess.run(
        command, env=dict(os.environ), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    said = done.stdout + done.stderr
    print(done.stderr, end="")
    if refusal := next((line for line in said.splitlines() if any(r in line for r in REFUSED)), ""):
        print(f"ncu may not read the counters: {refusal.strip()}")
        return SKIPPED
    rows = kernel_rows(done.stdout)
    if done.returncode or not rows:
        print(f"{done.stdout[-3000:]}\nncu: exit status {done.returncode}, {len(rows)} kernels")
        return 1
    launches = [x.removeprefix("launch ") for x in said.splitlines() if x.startswith("launch ")]
    Path(f"{files}.csv").write_text(done.stdout)
    Path(f"{files}.md").write_text(f"# Counters\n\n{table_of(rows, launches)}\n")
    print(f"{len(rows)} launches")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        work()
    elif len(sys.argv) == 2:
        sys.exit(main(sys.argv[1]))
    else:
        sys.exit(__doc__)
