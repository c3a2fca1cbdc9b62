"""Sends buckets of gradients in one order on all ranks, and receives what others have sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..layout.pages import BufferPool
from ..layout.slots import Slot
from ..transport.group import Group, Late, listed
from .gradient_buckets import GradientBucket

MOST_UNDER_WAY = 32 * 2**20  # bytes of buckets that are sent; a larger one goes alone
_WHAT = "counting the parameters that were used"


class Reducer:
    """The buckets of one model in a pass: sent in their order. All ranks have the same slots."""

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
        # Called when the slice of a bucket has the gradients of all ranks.
        self.on_received: Callable[[Sequence[Slot]], object] = lambda slots: None

    def begin(self) -> None:
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
        """
        self.took_all = False
        while self._next < len(self._buckets):
            self._send_next()
        counting = None
        if self._next == len(self._buckets):
            counting = UseCounts(self._slots, self._group, has_failed + 2 * says, waits)
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
        self.took_all = not any(word & 2 for word in counting.words)
        return counting.counts

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
        bucket = self._under_way.popleft()
        bucket.receive()
        self.on_received(bucket.slots)


class UseCounts:
    """In how many ranks each parameter was used in a pass, and on which ranks it has failed.

    Making it begins a collective. On a CUDA device only a rank that left a parameter out waits for
    the counts. Others hear that a pass has failed before they begin the next one.

    A rank's word is 1 if the pass has failed there, plus 2 if it has gradients of parameters
    without a slot.
    """

    def __init__(self, slots: Sequence[Slot], group: Group, word: int, waits: bool) -> None:
        self._group = group
        self._late: Late | None = None  # counts that this rank has not waited for
        mine = [slot.arrived for slot in slots]
        self.counts = [1] * len(mine)  # by slot, after `finish`; 1 where this rank does not wait
        self.words: list[int] = []  # of all ranks, after `finish`, if this one waits
        self._waits = waits or bool(word & 1) or group.device.type == "cpu" or not all(mine)
        if self._waits:
            words = [0] * group.total
            words[group.place] = word
            self._flags = torch.tensor([*mine, *words], dtype=torch.int32).to(group.device)
        else:  # without a copy to the device, for which the host would wait
            size = len(mine) + group.total
            self._flags = torch.zeros(size, dtype=torch.int32, device=group.device)
            self._flags[: len(mine)] = 1
        self._pending = group.start_adding(self._flags, _WHAT)

    def finish(self) -> None:
        """Return when the counts of this group are there, and then those of its replicas."""
        self._pending.wait()
        if self._group.replicas is not None:
            self._group.replicas.add_up_inside(self._flags, f"{_WHAT}, over the replicas")
        if self._waits:
            numbers, count = self._flags.tolist(), len(self.counts)
            self.counts, self.words = numbers[:count], numbers[count:]
        else:
            self._late = Late(self._flags)

    def refuse_failed(self) -> None:
        """Raise RuntimeError if the pass has failed on a rank, as far as this one waits."""
        if failed := [rank for rank, word in enumerate(self.words) if word & 1]:
            raise RuntimeError(
                f"faststep.zero: a backward pass has failed on {listed(failed)}, whose gradients "
                "are missing: call zero_grad() on all ranks and go on with the next batch; nothing "
                "was updated"
            )

    def refuse_late(self) -> None:
        """Before the next pass: raise what `refuse_failed` could not know."""
        late, self._late = self._late, None
        if late is not None and any(word & 1 for word in late.read()[len(self.counts) :].tolist()):
            raise RuntimeError(
                "faststep.zero: the backward pass before this one has failed on another rank, and "
                "the step after it used the others' gradients: start again from a checkpoint"
            )
