"""``python -m faststep run``: an unmodified script with faststep's classes in place of torch's."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Sequence

from .. import memory
from .changes import Changes, make_changes, summary
from .cores import fit_threads
from .program import Program
from .report import Report, say
from .spawned import swap_in_spawned
from .swaps import Swaps
from .timing import CallTimes

__all__ = ["PARTS", "start", "swap_silently"]

PARTS = ("optim", "amp", "clip", "data", "loss", "memory", "threads")


def start(
    program: Program,
    parts: Sequence[str] = PARTS,
    verbose: bool = False,
    changes: Changes | None = None,
) -> None:
    """Run a program in this process as Python would, with torch's classes swapped before.

    Returns when the program comes to its end. Its exceptions and SystemExit pass through.

    Args:
        program: what is run.
        parts: what of `PARTS` is used.
        verbose: say at the end which objects stayed torch's, and why.
        changes: what else is changed; its `parts` are not looked at.
    """
    meter = CallTimes()
    swaps = Swaps(meter)
    done = _swap(swaps, parts)
    if changes:
        make_changes(changes)
        done.append(summary(changes))
    if os.environ.get("RANK", "0") == "0":
        report = Report(meter, swaps, verbose)
        say("; ".join(filter(None, done)) or "nothing is changed")
        # The first that is registered runs last: what the program registers is measured too.
        atexit.register(report.at_exit)
    program.run()


def swap_silently(parts: Sequence[str]) -> None:
    """Swap the parts in a process that a program under `run` has spawned."""
    _swap(Swaps(CallTimes()), parts)


def _swap(swaps: Swaps, parts: Sequence[str]) -> list[str]:
    """Swap the parts, and say what was done."""
    swaps.count_steps()
    for part in ("optim", "amp", "clip", "data", "loss", "memory"):
        if part in parts:
            getattr(swaps, f"swap_{part}")()
    done = [*swaps.done]
    if "memory" in parts:
        done.append(_keep_memory())
    if "threads" in parts:
        done.append(fit_threads())
    swap_in_spawned(parts, swaps.note_spawned)
    return done


def _keep_memory() -> str:
    if os.environ.get("FASTSTEP_RETAIN") == "0":
        return "freed memory goes back to the system (FASTSTEP_RETAIN=0)"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = memory.retain()
    return "freed memory is kept" if kept else str(caught[0].message)
