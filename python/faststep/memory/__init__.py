"""Memory that torch frees stays with the process; activations take less of it."""

from __future__ import annotations

import os
import resource
import warnings
from pathlib import Path
from typing import NamedTuple

from .. import _C
from .fitting import BlockRow, Fitted, fit
from .groups import group_of
from .saving import save_on_cpu

__all__ = [
    "BlockRow",
    "Fitted",
    "Stats",
    "fit",
    "release",
    "retain",
    "save_on_cpu",
    "stats",
    "undo",
]

_VARIABLE = "FASTSTEP_RETAIN"


class Stats(NamedTuple):
    """The answer of :func:`stats`; memory in bytes."""

    retains: bool
    """True if memory that torch frees is kept."""
    reason: str | None
    """Why :func:`retain` can do nothing in this process; None if it can."""
    minor_faults: int
    """Page faults of the process that needed no disk, since it started."""
    major_faults: int
    """Those that did."""
    resident: int
    """Memory of the process."""
    kept: int
    """Part of it that is free and stays for the next tensors."""
    used: int
    """Part of it that tensors have from :func:`retain`'s heap."""
    limit: int | None
    """The most that is kept, or None where only the rules of :func:`retain` limit it."""


def retain(limit: int | None = None) -> bool:
    """Keep host memory that torch frees, from now on, in this process and those it forks.

    The C library returns the memory of large tensors to the system when they are freed. The next
    step takes it again, and pays a page fault for each page. After this call blocks of 128 KiB
    and more come from a heap that keeps what is freed, and asks for huge pages. Tensors and what
    is kept never have more than 17/16 of the most that tensors have had so far, and 16 MiB. In a
    control group with a memory limit, what is kept goes back before the limit is near. The kernel
    takes what is kept where memory is short. While a limit of addresses or data stands that the
    script has set later, nothing is kept.

    Calling it again sets another limit.

    Args:
        limit: the most that is kept, in bytes; what stands above it goes back to the system.
            None: no such limit.

    Returns:
        Whether memory is kept. False, with a RuntimeWarning, where the allocator is not glibc's
        (musl, tcmalloc, jemalloc, a sanitizer's), torch takes its memory in an unknown way, the
        process has a limit of addresses or data, the system does not overcommit memory, or its
        pages are larger than 16 KiB.

    Raises:
        TypeError: limit is not an int.
        ValueError: limit is negative.
    """
    if limit is not None:
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise TypeError(f"limit must be an int, in bytes, or None, not {limit!r}")
        if limit < 0:
            raise ValueError(f"limit must be at least 0, not {limit}")
    group = group_of(Path("/proc/self"), Path("/sys/fs/cgroup"))
    folder, version = (str(group.folder), group.version) if group else (None, 2)
    bound = -1 if limit is None else min(limit, 2**62)
    try:
        _C.retain_memory(bound, folder, version)
    except (MemoryError, RuntimeError) as error:
        warnings.warn(f"freed memory is not kept: {error}", RuntimeWarning, stacklevel=2)
        return False
    return True


def release() -> int:
    """Give the memory that is kept back to the system now; what is freed later is kept again.

    Returns:
        How many bytes went back.
    """
    return _C.release_memory()


def undo() -> int:
    """End :func:`retain`: new tensors come from the C library, and what is kept goes back.

    The memory of tensors that are in use goes back when they are freed.

    Returns:
        How many bytes went back.
    """
    return _C.end_retaining()


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def stats() -> Stats:
    """The memory that is kept, and the page faults and memory of this process."""
    retains, limit, used, kept, *_ = _C.retained_memory()
    foreign = _C.foreign_allocator()
    reason = f"malloc is that of {foreign}, not glibc's" if foreign else None
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Stats(retains, reason, usage.ru_minflt, usage.ru_majflt, _resident(), kept, used, limit)


def _begin() -> None:
    """Follow FASTSTEP_RETAIN when faststep is imported."""
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ImportError(f"{_VARIABLE}={value}: it must be 1, 0 or empty")
    if value == "1":
        retain()
