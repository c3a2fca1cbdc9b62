"""``faststep.profile()``: where the time of a part of a script goes."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from .phases import Place
from .sampler import INTERVAL, Sampler

MOST_LINES = 10
_measuring = threading.Lock()


class Line(NamedTuple):
    """A line of the script, and the share of the time that it takes in a phase."""

    file: str
    number: int
    phase: str
    share: float


class Profile:
    """Results of :func:`faststep.profile`; all are empty until its `with` block ends.

    Attributes:
        phases: the share of the time in each phase, from 0 to 1, largest first.
        steps: the seconds of each step of the optimizer that steps most often, or of each backward
            pass where none steps. The first begins with the `with` block.
        lines: at most ten lines of the script, dearest first: `file`, `number`, `phase`, `share`.
            What torch calls in a line is a part of it; a line of a dataset or a model is its own.
    """

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self.steps: list[float] = []
        self.lines: list[Line] = []

    def __str__(self) -> str:
        count = len(self.steps)
        mean, median = sum(self.steps) / max(1, count), sorted(self.steps or [0.0])[count // 2]
        rows = [f"{count} steps: mean {1e3 * mean:.1f} ms, median {1e3 * median:.1f} ms", ""]
        rows += [f"{name:16} {share:6.1%}" for name, share in self.phases.items()]
        rows.append("")
        for file, number, phase, share in self.lines:
            shown = min(file, os.path.relpath(file), key=len)
            rows.append(f"{phase:16} {share:6.1%}  {shown}:{number}")
        return "\n".join(rows).rstrip()

    def _fill(self, seconds: dict[tuple[str, Place | None], float]) -> None:
        total = sum(seconds.values())
        phases: dict[str, float] = defaultdict(float)
        for (phase, place), some in sorted(seconds.items(), key=lambda one: -one[1]):
            phases[phase] += some / total
            if place is not None and len(self.lines) < MOST_LINES:
                self.lines.append(Line(*place, phase, some / total))
        self.phases = dict(sorted(phases.items(), key=lambda one: -one[1]))


@contextlib.contextmanager
def profile() -> Iterator[Profile]:
    """Measure where the time of a `with` block goes.

    ``with faststep.profile() as measured: train()``, then ``print(measured)`` shows a table.
    Another thread looks at the stack of this one every 50 ms, so measure some seconds.
    Compilation and other work of the first steps count too.

    Yields:
        A :class:`.Profile`, filled in when the block ends, by an exception too.

    Raises:
        RuntimeError: another `with` block is being measured: they cannot be nested, nor run in two
            threads.
    """
    if not _measuring.acquire(blocking=False):
        raise RuntimeError(
            "faststep.profile() is measuring another block: end that one first, because blocks "
            "can neither be nested nor run in two threads"
        )
    measured = Profile()
    seconds: dict[tuple[str, Place | None], float] = defaultdict(float)
    before = begun = time.perf_counter()

    def looked(now: float, phase: str, inner: Place | None, outer: Place | None) -> None:
        nonlocal before
        seconds[phase, inner] += now - before
        before = now

    sampler = Sampler(INTERVAL, looked)
    sampler.start()
    try:
        yield measured
    finally:
        sampler.stop()
        _measuring.release()
        ends = max(sampler.ends.values(), key=len, default=[])
        measured.steps = [after - before for before, after in itertools.pairwise([begun, *ends])]
        measured._fill(seconds)
