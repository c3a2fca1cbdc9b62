"""How much of the machine other programs used while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

TOO_BUSY = 5.0  # percent of all cores


def _busy_seconds(stat: str) -> float:
    """The seconds that all cores have worked, from the text of /proc/stat."""
    user, nice, system, _idle, _waiting, *others = map(int, stat.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


class BusyWatch:
    """From its creation on, what others do; the time of ended children counts as this program's.

    Args:
        source: what the kernel says of the machine's time.
    """

    def __init__(self, source: Path = Path("/proc/stat")) -> None:
        self._source = source
        self._start = self._now()

    def _now(self) -> tuple[float, float, float] | None:
        if not self._source.is_file():
            return None
        own = os.times()
        seconds = own.user + own.system + own.children_user + own.children_system
        return time.monotonic(), _busy_seconds(self._source.read_text()), seconds

    def others(self, more: float = 0.0) -> float:
        """The percent of all cores' time that others took; NaN if the system does not tell.

        Args:
            more: seconds of processor time of this program's children that run still.
        """
        now = self._now()
        if self._start is None or now is None:
            return float("nan")
        wall, busy, own = (b - a for a, b in zip(self._start, now, strict=True))
        capacity = max(wall, 1e-9) * (os.cpu_count() or 1)
        return min(100.0, max(0.0, 100.0 * (busy - own - more) / capacity))


def busy_note(percent: float) -> str:
    """A warning to readers of figures; empty if others did little or nothing is known."""
    if not percent > TOO_BUSY:
        return ""
    return (
        f"The machine was busy with something else: {percent:.0f} % of its processor time. "
        "These times are not to be relied on."
    )
