"""The control groups of a process, and the one that limits its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LIMITS = {1: "memory.limit_in_bytes", 2: "memory.max"}
_NO_LIMIT = 2**60  # version 1 says so with a number near 2**63


class ControlGroup(NamedTuple):
    """A folder with the files of a memory controller."""

    folder: Path
    version: int
    limit: int


def _limit_of(folder: Path, version: int) -> int | None:
    try:
        text = (folder / _LIMITS[version]).read_text().strip()
    except OSError:
        return None  # the root has no such file, and a container may not show it
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def folders_of(process: Path, mount: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """The versions and folders of the groups of a process, and of all above them.

    Args:
        process: its folder in /proc.
        mount: where control groups are mounted. A container may show its own group there, under
            a path that the process does not have.
        controller: "memory" or "cpu"; at most one group of each version has it.
    """
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        top = mount / controller if version == 1 else mount
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place == top or top in place.parents:
                yield version, place


def group_of(process: Path, mount: Path) -> ControlGroup | None:
    """The group with the lowest limit of memory; for the arguments see `folders_of`."""
    found = []
    for version, folder in folders_of(process, mount, "memory"):
        limit = _limit_of(folder, version)
        if limit is not None:
            found.append(ControlGroup(folder, version, limit))
    return min(found, key=lambda group: group.limit, default=None)
