"""Scripts that take turns: of several processes, all of which have begun, one runs at a time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from faststep.cli.console import CommandError

Found = dict[str, Any]
Interval = tuple[float, float, float]  # a mean, and between what it lies

# Of Student's t: 97.5 % of it, for so many values less one. For more values, that of the normal.
_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18)
_NORMAL = 1.96


def interval(ratios: Sequence[float]) -> Interval:
    """The geometric mean of ratios, and the interval that has it in 95 of 100 cases."""
    logarithms = [math.log(ratio) for ratio in ratios]
    mean, degrees = statistics.fmean(logarithms), len(ratios) - 1
    if not degrees:
        return math.exp(mean), 0.0, math.inf
    quantile = _QUANTILES[degrees - 1] if degrees <= len(_QUANTILES) else _NORMAL
    half = quantile * statistics.stdev(logarithms) / math.sqrt(len(ratios))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def ratios(of: Sequence[Sequence[float]], to: Sequence[Sequence[float]]) -> list[float]:
    """How much longer one takes than the other: by rounds, the median of their turns."""
    return [
        statistics.median(a / b for a, b in zip(mine, others, strict=True))
        for mine, others in zip(of, to, strict=True)
    ]


class Player:
    """A script in a process group of its own, which is stopped while others run.

    Args:
        command: the interpreter and its arguments.
        environment: of the process.
        turn: how many steps it makes in a turn.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], turn: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="whole-")
        self._result = Path(self._folder.name) / "result.json"
        self._errors = Path(self._folder.name) / "errors"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*command, "--turn", str(turn), "--result", str(self._result)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return at the end of its turn, when it is stopped or has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "turn\n":
                os.killpg(self._process.pid, signal.SIGSTOP)  # with the workers of its loader
                return
        if self._process.wait():
            text = self._errors.read_text()[-4000:]
            raise CommandError(f"{' '.join(map(str, self._process.args))}: {text}")

    def go(self) -> None:
        """Let it make a turn of steps."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.wait()

    def result(self) -> Found:
        """The script's own figures, after its last turn."""
        found: Found = json.loads(self._result.read_text())
        return found

    def end(self) -> None:
        """End the process, its workers, and its files."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            self._folder.cleanup()


@contextlib.contextmanager
def _ending(players: list[Player]) -> Iterator[None]:
    try:
        yield
    finally:
        for player in players:
            player.end()


def play(
    commands: Mapping[str, tuple[Sequence[str], Mapping[str, str]]], turn: int, turns: int
) -> dict[str, Found]:
    """Run each of them, a command with its environment, for so many turns, there and back.

    Returns:
        by name the script's figures, and `turns`: the seconds of each turn.
    """
    players: list[Player] = []
    with _ending(players):
        for command, environment in commands.values():
            players.append(Player(command, environment, turn))
        for player in players:
            player.wait()
        for number in range(turns):
            for player in players[:: -1 if number % 2 else 1]:
                player.go()
        found = {name: player.result() for name, player in zip(commands, players, strict=True)}
    for run in found.values():
        steps = [sum(step) for step in zip(*run["phases"].values(), strict=True)]
        run["turns"] = [sum(steps[i * turn : (i + 1) * turn]) for i in range(turns)]
    return found
