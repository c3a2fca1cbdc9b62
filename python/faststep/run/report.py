"""What ``run`` prints on stderr: a line at the start, a table at the end."""

from __future__ import annotations

import contextlib
import os
import sys

from .meter import Meter, Moment
from .swaps import Swaps

__all__ = ["Report"]


class Report:
    """Prints for the process that made it."""

    def __init__(self, meter: Meter, swaps: Swaps, verbose: bool) -> None:
        self._meter = meter
        self._swaps = swaps
        self._verbose = verbose
        self._process = os.getpid()

    def say(self, text: str) -> None:
        """A line on stderr, unless nobody can read it: that must not end the program."""
        if sys.__stderr__ is not None:
            with contextlib.suppress(OSError, ValueError):
                print(f"faststep run: {text}", file=sys.__stderr__, flush=True)

    def at_exit(self) -> None:
        """The table, and with `verbose` what stayed torch's."""
        if os.getpid() != self._process:
            return  # a fork, which has the parent's functions for its end
        made = ", ".join(f"{count} {name}" for name, count in self._swaps.made.items())
        self.say(f"made {made or 'no object'}; {self._meter.steps} optimizer steps")
        first, last = self._meter.first, self._meter.last
        if first is not None and last is not None and last.steps > first.steps:
            self._table(first, last)
        if self._verbose:
            for (name, reason), count in self._swaps.left.items():
                self.say(f"{count} of {name} stayed torch's: {reason}")

    def _table(self, first: Moment, last: Moment) -> None:
        steps, whole = last.steps - first.steps, last.seconds - first.seconds
        rows = [("part", "calls per step", "ms per step", "share")]
        for name in last.calls:
            calls = last.calls[name] - first.calls[name]
            taken = last.taken[name] - first.taken[name]
            if calls:
                share = f"{100 * taken / whole:.1f} %"
                rows.append((name, f"{calls / steps:.2f}", f"{1e3 * taken / steps:.3f}", share))
        rows.append(("all", "", f"{1e3 * whole / steps:.3f}", "100.0 %"))
        self.say(f"from the end of the first step to the end of the last, {steps} steps by clock,")
        self.say("the time in faststep's calls; each without that in the calls it makes")
        for name, *cells in rows:
            self.say("  " + f"{name:12}" + "".join(f"{cell:>16}" for cell in cells))
        self.say(f"  page faults per step: {(last.faults - first.faults) / steps:.1f}")
