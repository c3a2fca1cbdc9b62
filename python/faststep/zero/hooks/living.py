"""The sharded models of this process. A backward pass may reach several."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..._torch.ddp import is_inside_backward
from ..layout.slots import Slot
from ..transport.group import Group
from .unowned import Unowned


class Passes(Protocol):
    """The gradients of one model.

    Attributes:
        made: how many were made before it.
        passes: the backward passes under way that have reached it, by their numbers.
    """

    made: int
    passes: set[int]
    group: Group
    slots: list[Slot]
    unowned: Unowned

    def finish(self) -> None:
        """Reduce what is left; a collective."""


_count = itertools.count()
_living: weakref.WeakSet[Passes] = weakref.WeakSet()


def add(gradients: Passes) -> int:
    """Note one more; returns how many there were before."""
    _living.add(gradients)
    return next(_count)


def params() -> set[int]:
    """The parameters of all sharded models, by `id`."""
    return {id(slot.param) for one in _living for slot in one.slots}


def unowned() -> set[int]:
    """The parameters that are reduced and have no sharded optimizer, by `id`."""
    return set().union(*(one.unowned.ids() for one in _living))


def let_go(params: Sequence[Tensor]) -> None:
    """Let a sharded optimizer have parameters."""
    for one in _living:
        one.unowned.leave(params)


def refuse_two(number: int, group: Group) -> None:
    """Raise RuntimeError if a pass has reached another model, with messages in the same group."""
    if any(
        number in one.passes and one.group.process_group is group.process_group for one in _living
    ):
        raise RuntimeError(
            "faststep.zero: one backward pass reaches two models that were sharded over the same "
            "process_group, where their messages could change places: give each a "
            "torch.distributed.new_group() of its own"
        )


def end(number: int) -> None:
    """Complete a backward pass for all sharded models that it has reached.

    Ranks may reach the models in different orders, and wait for each other in each. The end of a
    pass that is inside of another is not that of the other, of which nobody hears if all gradients
    came inside: the next use of the gradients completes it.
    """
    ended = [one for one in _living if number in one.passes]
    for one in ended:
        one.passes.discard(number)
    if not is_inside_backward():
        for one in sorted(ended, key=lambda gradients: gradients.made):
            one.finish()
