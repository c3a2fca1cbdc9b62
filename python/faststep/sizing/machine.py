"""The machine that a plan is for, and how long messages take on it."""

from __future__ import annotations

import math
from typing import NamedTuple

LATENCY = 5e-6  # seconds of a collective, for each doubling of the ranks


class Machine(NamedTuple):
    """GPUs and what connects them. Rates are in bytes per second, in one direction.

    Args:
        gpus: of a node; each has a rank.
        nodes: how many of these.
        memory: bytes of a GPU.
        inside: from a GPU to those of its node.
        link: from a node to the others.
        host: between a GPU and host memory.
        dram: of a node's host memory, which its ranks share.
        flops: floating-point operations per second of a GPU, as training reaches them.
    """

    gpus: int
    nodes: int
    memory: int
    inside: float
    link: float
    host: float
    dram: float
    flops: float

    @property
    def ranks(self) -> int:
        """All GPUs."""
        return self.gpus * self.nodes

    def seconds(self, sent: float, messages: int) -> float:
        """The time of collectives in which each rank sends so many bytes.

        The ranks form rings, so that a node sends the others as many bytes as a rank.
        """
        if self.ranks == 1:
            return 0.0
        slowest = min(
            self.inside if self.gpus > 1 else math.inf, self.link if self.nodes > 1 else math.inf
        )
        return sent / slowest + messages * LATENCY * math.log2(self.ranks)
