"""Finds the rank for which the others wait. What rank 0 does is found elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from .phases import PHASES

LEAST = 0.05  # of a step
LOOKS = 100  # at the stack of a rank, per second
WAITS = {"communication", "backward"}  # phases in which ranks may wait for each other
OF_DDP = {"forward"}  # which has its own in it


class Late(NamedTuple):
    """A rank that has more to do in each step than the others.

    Attributes:
        rank: its number.
        phase: that which differs most.
        share: of a step, for which the others wait.
        there: the phase's share of a step in this rank.
        elsewhere: the same in the others, their median.
    """

    rank: int
    phase: str
    share: float
    there: float
    elsewhere: float


def late(found: Mapping[str, Any]) -> Late | None:
    """The rank but 0 that lets others wait most, if by more than looks at stacks may be wrong."""
    total = sum(found["steps"])
    waits = WAITS | OF_DDP if found["is_ddp"] else WAITS
    own_phases = [phase for phase in PHASES if phase not in waits]
    if not found["ranks"] or not total:
        return None
    shares = {one["rank"]: one["phases"] for one in found["ranks"]}
    shares[0] = {phase: spent / total for phase, spent in found["phases"].items()}
    own = {rank: sum(phases.get(one, 0.0) for one in own_phases) for rank, phases in shares.items()}
    last = max(own, key=own.__getitem__)
    usual = median(share for rank, share in own.items() if rank != last)
    noise = math.sqrt(own[last] * max(0.0, 1.0 - own[last]) / (LOOKS * total))
    if last == 0 or own[last] - usual < LEAST + 2.0 * noise:
        return None
    others = [phases for rank, phases in shares.items() if rank != last]
    usuals = {phase: median(one.get(phase, 0.0) for one in others) for phase in own_phases}
    phase = max(own_phases, key=lambda one: shares[last].get(one, 0.0) - usuals[one])
    there = shares[last].get(phase, 0.0)
    return Late(last, phase, own[last] - usual, there, usuals[phase])
