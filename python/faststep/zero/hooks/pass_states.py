"""Where a rank is between two steps; docs/decisions/zero.md says what each event does."""

from __future__ import annotations

import enum

__all__ = ["HAS_FAILED", "State"]


class State(enum.Enum):
    """The state of the gradients since the last zero_grad().

    Attributes:
        IDLE: there are none.
        COLLECTING: this rank has some that were not all reduced: those of a backward pass that is
            under way, or that no_sync() has left.
        REDUCED: the slices have the sums of all ranks.
        FAILED: a backward pass did not end, here or on another rank.
    """

    IDLE = enum.auto()
    COLLECTING = enum.auto()
    REDUCED = enum.auto()
    FAILED = enum.auto()


HAS_FAILED = (
    "faststep.zero: a backward pass has failed, and the gradients are not those of the whole model "
    "on all ranks: call zero_grad() and go on with the next batch"
)
