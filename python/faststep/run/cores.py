"""The number of torch's threads that fits the cores which this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..memory.groups import folders_of

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def fit_threads() -> str:
    """Set the number of torch's threads, unless the user has; says what was done."""
    chosen = [name for name in VARIABLES if os.environ.get(name)]
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    before = torch.get_num_threads()
    if chosen and not (ranks > 1 and chosen == ["OMP_NUM_THREADS"] and _is_torchruns()):
        return f"{counted(before)} ({chosen[0]} is set)"
    fitting = max(1, cores(Path("/proc/self"), Path("/sys")) // ranks)
    if chosen or fitting < before:
        torch.set_num_threads(fitting)
    return counted(torch.get_num_threads())


def counted(threads: int) -> str:
    """So many threads, in words."""
    return f"{threads} thread{'' if threads == 1 else 's'}"


def _is_torchruns() -> bool:
    """True if torchrun, which started this process, has set OMP_NUM_THREADS to 1 by itself."""
    if os.environ["OMP_NUM_THREADS"] != "1":
        return False
    try:
        environment = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return False
    names = {entry.partition(b"=")[0] for entry in environment.split(b"\0")}
    return b"OMP_NUM_THREADS" not in names


def cores(process: Path, system: Path) -> int:
    """Physical cores that a process may use, as its affinity and its control groups say.

    Args:
        process: its folder in /proc.
        system: where /sys is mounted.
    """
    allowed = os.sched_getaffinity(0)
    shared = set()
    for number in allowed:
        siblings = system / f"devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        shared.add(siblings.read_text() if siblings.is_file() else str(number))
    groups = folders_of(process, system / "fs" / "cgroup", "cpu")
    quotas = [quota for _, group in groups for quota in _quota(group)]
    return max(1, min(len(shared), *quotas, 2**30))


def _quota(group: Path) -> list[int]:
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = (
                (group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
    except OSError:
        return []  # no limit at this level, or a container does not show it
    return [max(1, int(quota) // int(period))] if quota.isdigit() else []
