"""The control group that limits the memory of a process."""

from __future__ import annotations

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


def _memberships(process: Path) -> list[tuple[int, str]]:
    """The version and path of each group of memory; there are at most two."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found.append((2, path))
        elif "memory" in controllers.split(","):
            found.append((1, path))
    return found


def group_of(process: Path, mount: Path) -> ControlGroup | None:
    """The group with the lowest limit among those of a process and all above them.

    Args:
        process: its folder in /proc.
        mount: where control groups are mounted. A container may show its own group there, under
            a path that the process does not have.
    """
    found = []
    for version, path in _memberships(process):
        top = mount / "memory" if version == 1 else mount
        folder = top / path.lstrip("/")
        for place in [folder, *folder.parents]:
            if place != top and top not in place.parents:
                break
            limit = _limit_of(place, version)
            if limit is not None:
                found.append(ControlGroup(place, version, limit))
    return min(found, key=lambda group: group.limit, default=None)
