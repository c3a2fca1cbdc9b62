"""The meter of a script: its losses, the seconds of each phase, page faults, the peak.

It imports neither torch nor faststep, so that a script runs the same in every way.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

PHASES = ("data", "forward", "backward", "clip", "step")
T = TypeVar("T")


def options() -> argparse.Namespace:
    """The arguments that every script takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before these")
    parser.add_argument("--result", type=Path, help="a JSON file; default: stdout")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--files", type=Path, help="a folder for generated files, which stay")
    parser.add_argument("--workers", type=int, default=0, help="of a loader of files")
    parser.add_argument("--bf16", action="store_true", help="forward under autocast")
    parser.add_argument(
        "--turn",
        type=int,
        default=0,
        metavar="STEPS",
        help="say `turn` and wait for a line of stdin before each STEPS steps that are measured",
    )
    return parser.parse_args()


def again_and_again(loader: Iterable[T]) -> Iterator[T]:
    """The batches of one epoch after the other."""
    while True:
        yield from loader


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status does not tell the peak of resident memory")


class Meter:
    """Takes the time between its marks.

    Args:
        given: the script's options.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._last = 0.0
        self._phases: list[dict[str, float]] = []
        self._losses: list[float] = []

    def steps(self) -> Iterator[int]:
        """Number the steps; after the last one the result is written."""
        before = 0
        for step in range(self._given.warm_up + self._given.steps):
            measured = step - self._given.warm_up
            if self._given.turn and measured >= 0 and measured % self._given.turn == 0:
                print("turn", flush=True)
                sys.stdin.readline()
            if measured == 0:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            self._phases.append(dict.fromkeys(PHASES, 0.0))
            self._last = time.perf_counter()
            yield step
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        self._write(faults / self._given.steps)

    def mark(self, phase: str) -> None:
        """The time since the last mark, or since the step began, is that of this phase."""
        now = time.perf_counter()
        self._phases[-1][phase] += now - self._last
        self._last = now

    def loss(self, value: float) -> None:
        """Note the loss of this step, outside its time."""
        self._losses.append(value)

    def _write(self, faults: float) -> None:
        measured = self._phases[self._given.warm_up :]
        result: dict[str, Any] = {
            "phases": {name: [phases[name] for phases in measured] for name in PHASES},
            "faults": faults,
            "peak": peak(),
            "losses": self._losses,
        }
        text = json.dumps(result)
        if self._given.result is None:
            print(text)
        else:
            self._given.result.write_text(text)
