"""The meter of a training loop on a CUDA device: seconds of a step, losses, and the peak.

It imports no faststep, so that a script runs the same in every way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["CudaMeter", "options"]

WARM_UP = 10


def options() -> argparse.Namespace:
    """The arguments that every script takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=6, help="that are measured")
    parser.add_argument("--turn", type=int, default=10, metavar="STEPS", help="of a turn")
    parser.add_argument("--result", type=Path, required=True, help="a JSON file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--small", action="store_true", help="a model of four layers of 256")
    return parser.parse_args()


class CudaMeter:
    """Times turns of steps, before and after which the device is waited for.

    Args:
        given: the script's options.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._losses: list[torch.Tensor] = []
        self._on_cuda = given.device == "cuda"

    def _wait(self) -> float:
        if self._on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def steps(self) -> Iterator[int]:
        """Number the steps; before each turn say `turn` and wait for a line of stdin."""
        yield from range(WARM_UP)
        seconds = []
        for turn in range(self._given.turns):
            self._wait()
            print("turn", flush=True)
            sys.stdin.readline()
            start = self._wait()
            yield from range(turn * self._given.turn, (turn + 1) * self._given.turn)
            seconds += [(self._wait() - start) / self._given.turn] * self._given.turn
        peak = torch.cuda.max_memory_allocated() if self._on_cuda else 0
        losses = [float(loss) for loss in self._losses]
        result = {"phases": {"step": seconds}, "peak": peak, "losses": losses}
        self._given.result.write_text(json.dumps(result))

    def loss(self, value: torch.Tensor) -> None:
        """Keep the loss of a step on its device."""
        self._losses.append(value.detach().clone())
