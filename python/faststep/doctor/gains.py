"""Compares two runs of a script: how much faster one is, how sure that is, and what it computes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

RESAMPLED = 400
GROUPS = 40  # of steps that follow each other: neighbours are alike
ROUNDED = 1e-3  # the largest relative difference of losses that rounding makes in a few steps
MANY = 10.0  # more than one rounding of the gradients makes


class Gain(NamedTuple):
    """How often as fast: the estimate, and the bounds of its 95 % interval."""

    gain: float
    low: float
    high: float


def compare(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Gain:
    """The gain of the second of each pair of runs over the first, from seconds per step.

    A pair is compared over as many steps as both have, so that what comes every so many steps
    weighs the same in both.
    """
    grouped = [_grouped(before, after) for before, after in pairs]
    gain = math.exp(sum(math.log(_ratio(pair)) for pair in grouped) / len(grouped))
    source = random.Random(0)
    found = []
    for _ in range(RESAMPLED):
        chosen = [source.choice(grouped) for _ in grouped]
        logs = [math.log(_ratio([source.choices(side, k=len(side)) for side in pair]))
                for pair in chosen]  # fmt: skip
        found.append(math.exp(sum(logs) / len(logs)))
    found.sort()
    return Gain(gain, found[RESAMPLED // 40], found[-RESAMPLED // 40])


def ratio(before: Sequence[float], after: Sequence[float]) -> float:
    """The gain of one run over another."""
    return _ratio(_grouped(before, after))


def _grouped(before: Sequence[float], after: Sequence[float]) -> list[list[float]]:
    """The mean seconds of groups of steps, of both runs."""
    count = min(len(before), len(after))
    size = max(1, count // GROUPS)
    starts = range(0, count - size + 1, size)
    return [[sum(side[at : at + size]) / size for at in starts] for side in (before, after)]


def _ratio(pair: Sequence[Sequence[float]]) -> float:
    before, after = (sum(side) / len(side) for side in pair)
    return before / after


def deviations(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """The relative differences of two runs' losses; the largest of all until then, for each."""
    found, most = [], 0.0
    for a, b in zip(before, after, strict=False):
        if a != b and not (a != a and b != b):
            relative = abs(a - b) / max(abs(a), abs(b), 1e-30)
            most = max(most, relative if relative == relative else float("inf"))
        found.append(most)
    return found


def is_rounding(found: Sequence[float], own: Sequence[float]) -> bool:
    """True if losses deviate by what rounding does to them.

    Args:
        found: the deviations.
        own: those of a run whose gradients were multiplied by 1 + 2^-23, if there was one.
    """
    limits = [max(ROUNDED, MANY * one) for one in own] or [ROUNDED] * len(found)
    return all(one <= limit for one, limit in zip(found, limits, strict=False))
