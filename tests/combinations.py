"""Fewer cases than the product of all options, with every choice of three options among them."""

import itertools
import random
from collections.abc import Hashable, Sequence
from typing import TypeVar

Case = TypeVar("Case", bound=tuple[Hashable, ...])


def choices(case: tuple[Hashable, ...], count: int) -> list[Hashable]:
    """What a case chooses of each `count` options."""
    return list(itertools.combinations(enumerate(case), count))


def of_three(cases: Sequence[Case]) -> list[Case]:
    """Some of the cases, in their order: what any three options choose together occurs in one.

    A fault that shows with four options only, and with no three of them, would be missed. Of the
    cases, in an order that is drawn once, those go first that add the most.
    """
    drawn = list(range(len(cases)))
    random.Random(0).shuffle(drawn)
    wanted = [choices(case, 3) for case in cases]
    seen: set[Hashable] = set()
    taken = set()
    most = max(map(len, wanted), default=0)
    for least in sorted({most, most * 3 // 4, most // 2, most // 4, most // 8, 1} - {0})[::-1]:
        for index in drawn:
            if index not in taken and sum(c not in seen for c in wanted[index]) >= least:
                taken.add(index)
                seen.update(wanted[index])
    return [cases[index] for index in sorted(taken)]
