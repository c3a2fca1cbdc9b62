"""The output of ``run`` on stderr: a line at the start, a table at the end."""

from __future__ import annotations

import contextlib
import os
import sys

from .swaps import Swaps
from .timing import CallTimes, Moment


def say(text: str) -> None:
    """A line on stderr, unless nobody can read it: that must not end the program."""
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"faststep run: {text}", file=sys.__stderr__, flush=True)


class Report:
    """Prints for the process that made it."""

    def __init__(self, meter: CallTimes, swaps: Swaps, verbose: bool) -> None:
        self._meter = meter
        self._swaps = swaps
        self._verbose = verbose
        self._process = os.getpid()

    def at_exit(self) -> None:
        """The table, and with `verbose` what stayed torch's."""
        if os.getpid() != self._process:
            return  # a fork, which has the parent's functions for its end
        made = ", ".join(f"{count} {name}" for name, count in self._swaps.made.items())
        say(f"made {made or 'no object'} of faststep's classes")
        for kind, count in self._swaps.met.items():
            steps, whose = self._meter.steps[kind], self._swaps.whose(kind)
            what = f"{_counted(count, 'object')}, {_counted(steps, 'step')}"
            say(f"{kind.__name__} ({whose}): {what}")
        first, last = self._meter.first, self._meter.last
        if first is not None and last is not None and last is not first:
            self._table(first, last)
        elif calls := {name: count for name, count in self._meter.calls.items() if count}:
            say("calls: " + ", ".join(f"{count} of {name}" for name, count in calls.items()))
        if self._meter.calls.get("clipping"):
            say("clipping: faststep's norm is right to 1e-8; torch's is off by 1e-4 and more")
            say("for large tensors: losses of clipped steps may differ by that")
        if swapped := self._swaps.spawned:
            were = f"{_counted(swapped, 'process', 'es')} {'was' if swapped == 1 else 'were'}"
            say(f"{were} started anew, with faststep's classes; they are not in this report")
        if self._verbose:
            for (name, reason), count in self._swaps.left.items():
                say(f"{count} of {name} stayed torch's: {reason}")

    def _table(self, first: Moment, last: Moment) -> None:
        whole = last.seconds - first.seconds
        rows = [("part", "calls", "ms per call", "share")]
        for name in last.calls:
            calls = last.calls[name] - first.calls.get(name, 0)
            taken = last.taken[name] - first.taken.get(name, 0.0)
            if calls:
                rows.append((name, f"{calls}", f"{1e3 * taken / calls:.3f}", _share(taken, whole)))
        rows.append(("all", "", f"{1e3 * whole:.3f}", "100.0 %"))
        say("from the end of the first step of an optimizer to the end of the last, by clock;")
        say("the time of each call is without that in the calls that it makes")
        for name, *cells in rows:
            say("  " + f"{name:16}" + "".join(f"{cell:>14}" for cell in cells))
        faults = self._meter.faults_per_step()
        say(f"  page faults per step of an optimizer: {faults:.1f}")


def _share(taken: float, whole: float) -> str:
    return f"{100 * taken / whole:.1f} %"


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"
