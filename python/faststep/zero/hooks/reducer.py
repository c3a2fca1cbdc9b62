"""Sends buckets of gradients in one order on all ranks, and receives what others have sent."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from ..layout.pages import BufferPool
from ..layout.slots import Slot
from ..transport.group import Group
from .gradient_buckets import GradientBucket
from .use_counts import UseCounts

MOST_UNDER_WAY = 32 * 2**20  # bytes of buckets that are sent; a larger one goes alone


class Reducer:
    """The buckets of one model in a pass.

    Args:
        slots: all parameters, in one order on all ranks.
        buckets: where their gradients go, in the order in which they are sent.
        group: the ranks.
        pool: memory of what arrives.
    """

    def __init__(
        self, slots: list[Slot], buckets: list[GradientBucket], group: Group, pool: BufferPool
    ) -> None:
        self._slots = slots
        self._buckets = buckets
        self._group = group
        self._pool = pool
        self.took_all = True  # gradients of the pass, on all ranks
        self._next = 0  # what is sent next: a bucket, the counts after the last, or nothing
        self._under_way: deque[GradientBucket] = deque()
        self._counted: UseCounts | None = None  # the last counts of a pass

    def begin(self) -> None:
        """Start a pass."""
        if self._counted is not None:
            self._counted.refuse_late()
        for bucket in self._buckets:
            bucket.begin()
        self._next = 0

    def has_sent(self, slot: Slot) -> bool:
        """True if the gradient of a parameter is on its way."""
        return slot.bucket < self._next

    def put(self, slot: Slot, grad: Tensor) -> None:
        """Take over a gradient of this rank, or add to it."""
        bucket = self._buckets[slot.bucket]
        bucket.put(slot, grad, again=slot.arrived)
        bucket.missing -= not slot.arrived
        slot.arrived = True

    def send_full(self) -> None:
        """Send the buckets that are full, and receive those that are there."""
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send_next()
        while self._under_way and self._under_way[0].is_there():
            self._receive_next()

    def complete(
        self, has_failed: bool = False, waits: bool = False, says: bool = False
    ) -> list[int]:
        """Send and receive what is left; returns in how many ranks each parameter was used.

        Args:
            has_failed: what arrives is dropped, and the other ranks hear of that.
            waits: this rank must know of failures at once, on a CUDA device too.
            says: this rank has gradients of parameters without a slot.

        Raises:
            RuntimeError: the pass has failed on another rank.
        """
        self.took_all = False
        while self._next < len(self._buckets):
            self._send_next()
        counting = None
        if self._next == len(self._buckets):
            counting = UseCounts(self._slots, self._group, has_failed, waits, says)
            self._next += 1
        if self._group.replicas is not None:
            for bucket in self._under_way:
                bucket.add()
        while self._under_way:
            self._receive_next()
        self._pool.clear()
        if counting is None:  # all of it was done before, and another rank had failed
            return [0] * len(self._slots)
        # After the buckets, whose errors name parameters, and which some ranks have sent to
        # their replicas in backward.
        self._counted = counting
        counting.finish()
        if not has_failed:
            counting.refuse_failed()
        self.took_all = not counting.says_one()
        return counting.counts()

    def drop(self) -> None:
        """Let go of all gradients."""
        for bucket in self._buckets:
            bucket.drop()

    def _send_next(self) -> None:
        """Send a bucket; with zeros where its gradients have not arrived."""
        bucket = self._buckets[self._next]
        # Backward would otherwise run ahead of a slow network, with all gradients in memory.
        room = MOST_UNDER_WAY - bucket.nbytes
        while self._under_way and sum(one.nbytes for one in self._under_way) > room:
            self._receive_next()
        bucket.send()
        self._next += 1
        self._under_way.append(bucket)

    def _receive_next(self) -> None:
        self._under_way.popleft().receive()
