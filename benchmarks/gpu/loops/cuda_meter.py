"""The meter of a training loop on a CUDA device: seconds of blocks of steps, losses, and the peak.

It imports no faststep, so that a script runs the same in every way.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import torch

__all__ = ["CudaMeter", "options"]

WARM_UP = 10


def options() -> argparse.Namespace:
    """The arguments that every script takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=5, help="that are measured")
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--small", action="store_true", help="a model of four layers of 256")
    return parser.parse_args()


class CudaMeter:
    """Times blocks of steps, between which the device is waited for.

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
        """Number the steps; after the last one the result is printed as a line of JSON."""
        yield from range(WARM_UP)
        blocks = []
        for block in range(self._given.blocks):
            start = self._wait()
            yield from range(block * self._given.steps, (block + 1) * self._given.steps)
            blocks.append((self._wait() - start) / self._given.steps)
        peak = torch.cuda.max_memory_allocated() if self._on_cuda else 0
        losses = [float(loss) for loss in self._losses]
        print(json.dumps({"seconds": blocks, "peak": peak, "losses": losses}))

    def loss(self, value: torch.Tensor) -> None:
        """Keep the loss of a step on its device."""
        self._losses.append(value.detach().clone())
