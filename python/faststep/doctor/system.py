"""Settings of a machine that slow a script, or that it will run into."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..memory.groups import group_of
from .findings import LEAST
from .gpu import notes_on_gpu
from .remedies import KEPT

PROC, SYS = Path("/proc"), Path("/sys")
SWAPPED = 64 << 20  # bytes
PER_WORKER = 64 << 20  # bytes of shared memory for the batches of a worker
FULL = 0.9  # of a limit
BUSY = 0.25  # of the cores


def busy_seconds() -> tuple[float, float]:
    """The seconds that all cores have worked, and those that the processes which are seen have.

    In a sandbox these are the script's alone.
    """
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system = map(int, (PROC / "stat").read_text().split()[1:4])
    own = 0
    for path in PROC.glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        own += sum(map(int, fields[11:15]))  # its own, and that of children it has waited for
    return (user + nice + system) / tick, own / tick


def notes(
    found: Mapping[str, Any],
    variables: Mapping[str, str] = os.environ,
    proc: Path = PROC,
    sys: Path = SYS,
    shared: str = "/dev/shm",
) -> list[str]:
    """One sentence for each thing that matters to a script, with its remedy.

    Args:
        found: what a run of it has found.
        variables: of its environment.
        proc: where /proc is.
        sys: where /sys is.
        shared: the folder of shared memory.
    """
    made = [*_of_others(found), *_of_memory(found, proc, sys), *_of_cores(sys)]
    made += [*_of_loaders(found, shared), *notes_on_gpu(found)]
    return [*made, *_of_variables(found, variables)]


def _of_others(found: Mapping[str, Any]) -> Iterator[str]:
    if found["others"] > BUSY * found["cores"]:
        yield (
            f"other programs used {found['others']:.1f} of {found['cores']} cores meanwhile: "
            "gains are uncertain, end them and ask again"
        )


def _of_memory(found: Mapping[str, Any], proc: Path, sys: Path) -> Iterator[str]:
    if found["swapped"] > SWAPPED:
        swappiness = _text(proc / "sys/vm/swappiness")
        yield (
            f"{found['swapped'] >> 20} MiB of the process lie in swap (vm.swappiness is "
            f"{swappiness}): free memory, or set sysctl vm.swappiness=10"
        )
    pages = _text(sys / "kernel/mm/transparent_hugepage/enabled")
    if "[never]" in pages and found["switched"].get(KEPT, [0, 0])[1] > 1.0 + LEAST:
        yield "huge pages are off: write madvise to /sys/kernel/mm/transparent_hugepage/enabled"
    group = group_of(proc / "self", sys / "fs/cgroup")
    if group is not None and found["peak"] > FULL * group.limit:
        yield (
            f"the peak of {found['peak'] >> 20} MiB is near the container's limit of "
            f"{group.limit >> 20} MiB"
        )


def _of_cores(sys: Path) -> Iterator[str]:
    allowed = os.sched_getaffinity(0)
    cpus = sys / "devices/system/cpu"
    governors = {_text(cpus / f"cpu{number}/cpufreq/scaling_governor") for number in allowed}
    if governors & {"powersave", "conservative"}:
        drivers = {_text(cpus / f"cpu{number}/cpufreq/scaling_driver") for number in allowed}
        if not drivers & {"intel_pstate", "amd-pstate-epp"}:  # whose powersave is fast too
            yield ("the cores save power (scaling_governor): cpupower frequency-set -g performance")
    nodes = [
        node.parent.name.removeprefix("node")
        for node in sorted(sys.glob("devices/system/node/node[0-9]*/cpulist"))
        if _numbers(_text(node)) & allowed
    ]
    if len(nodes) > 1:
        yield (
            f"the process may use cores of {len(nodes)} NUMA nodes: try numactl "
            f"--cpunodebind={nodes[0]} --membind={nodes[0]}"
        )


def _of_loaders(found: Mapping[str, Any], shared: str) -> Iterator[str]:
    workers = max((use["workers"] for use in found["loaders"]), default=0)
    if not workers:
        return
    space = os.statvfs(shared)
    free = space.f_bavail * space.f_frsize
    if free < workers * PER_WORKER:
        yield (
            f"{shared} has {free >> 20} MiB free for the batches of {workers} workers: give the "
            "container more (docker run --shm-size=8g)"
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < 256 * workers:
        yield (
            f"a process may open {files} files, and each tensor of a waiting batch is one: "
            "raise ulimit -n"
        )


def _of_variables(found: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[str]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = variables.get(name, "")
        if value.isdigit() and int(value) > found["cores"]:
            yield f"{name} is {value}, and the process may use {found['cores']} cores: unset it"
    if variables.get("NCCL_P2P_DISABLE") == "1" or variables.get("NCCL_IB_DISABLE") == "1":
        yield "NCCL may not use its fast ways (NCCL_P2P_DISABLE, NCCL_IB_DISABLE): unset them"


def _text(path: Path) -> str:
    """The text of a file; empty where this kernel has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _numbers(ranges: str) -> set[int]:
    """The numbers of "0-3,8"."""
    made: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        made |= set(range(int(first), int(last or first) + 1))
    return made
