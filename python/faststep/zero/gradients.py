"""Gradients on their way from backward to the slices of the ranks.

A hook on each parameter copies its gradient into a bucket. Full buckets are sent at once, in one
order on every rank: a bucket waits for those before it. When backward ends, the other buckets are
sent, with zeros for parameters that this rank did not use; the ranks then add up in how many of
them each parameter was used, and wait for all buckets. So after backward `.grad` is set on all
ranks or on none.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .._torch.compiler import disable_dynamo
from .._torch.ddp import after_backward, current_backward, is_inside_backward
from ..grads.hooks import Hooked
from .buckets import GradientBucket
from .group import Group
from .in_backward import BackwardUpdates
from .pages import Shelf
from .placeholder import Placeholder
from .slots import Slot
from .uses import Uses

__all__ = ["Gradients", "sharded_params"]

_count = itertools.count()
_living: weakref.WeakSet[Gradients] = weakref.WeakSet()

MOST_UNDER_WAY = 32 * 2**20  # bytes of buckets that are sent; a larger one goes alone


class Gradients:
    """The hooks of one model, and its buckets."""

    updates: BackwardUpdates | None = None  # with update="backward"

    def __init__(
        self,
        slots: list[Slot],
        buckets: list[GradientBucket],
        group: Group,
        shelf: Shelf,
        uses: type[Uses] = Uses,
    ) -> None:
        self._slots = slots
        self._uses = uses
        self._buckets = buckets
        self._group = group
        self._shelf = shelf
        self._quiet = 0  # nested no_sync() contexts
        self._unsent = False  # whether a no_sync() may have left gradients of this rank
        self._passes: set[int] = set()  # backward passes whose end is to be noticed
        self._running: set[int] = set()  # those of them whose end has not come
        self._open = False  # whether a pass has begun and is not complete
        self._next = 0  # the bucket that is sent next
        self._under_way: deque[GradientBucket] = deque()
        self._hooks: Hooked[Slot] = Hooked()
        self.on_begin: Callable[[bool], None] = _nothing
        self._made = next(_count)  # the same order on all ranks, as shard() is a collective
        _living.add(self)
        self._attach()

    def _attach(self) -> None:
        """Have gradients handed over by a hook on each parameter."""
        for slot in self._slots:
            self._hooks.add(slot.param, slot, _hook(weakref.ref(self), slot))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward leaves gradients on this rank; the next one outside sends their sums."""
        self._quiet += 1
        self._unsent = True
        try:
            yield
        finally:
            self._quiet -= 1

    def arrived(self, slot: Slot) -> None:
        """Called by the hook of a parameter whose gradient is in `.grad`."""
        if self._quiet:
            held = slot.param.grad
            if isinstance(held, Placeholder) and held.pending is not None:
                held.pending = held.pending.clone()  # autograd may use that memory again
            return
        self._note_pass()
        grad = self._taken(slot)
        if grad is not None:
            self._put(slot, grad)

    def _put(self, slot: Slot, grad: Tensor) -> None:
        """Take over a gradient of the pass, and send the buckets that are full."""
        bucket = self._buckets[slot.bucket]
        if slot.arrived:
            if bucket.is_sent:
                raise RuntimeError(
                    f"faststep.zero: the gradient of {slot.name!r} came twice in one backward "
                    "pass, and its bucket was sent after the first time. Either a backward pass "
                    "before this one has failed, or reentrant checkpoints share the parameter: "
                    "use torch.utils.checkpoint with use_reentrant=False"
                )
            bucket.put(slot, grad, again=True)
            return
        bucket.put(slot, grad)
        slot.arrived = True
        bucket.missing -= 1
        self._send_full()

    def _note_pass(self) -> None:
        """Begin a pass at its first gradient."""
        number = current_backward()
        if number in self._passes:
            return
        for other in _living:
            if number in other._passes and other._group.is_shared_with(self._group):
                raise RuntimeError(
                    "faststep.zero: one backward pass reaches two models that were sharded over "
                    "the same process_group, where their messages could change places: give each "
                    "a torch.distributed.new_group() of its own"
                )
        if not self._open:
            self.on_begin(True)
            self.begin()
        self._passes.add(number)
        self._running.add(number)
        self._finish_after_backward(number)

    def _finish_after_backward(self, number: int) -> None:
        """When DistributedDataParallel, if there is one, has put its buckets into `.grad`.

        It queues that after this, so the end is queued when the pass is over.
        """
        after_backward(lambda: after_backward(lambda: _end(number)))

    def begin(self) -> None:
        """Start to collect gradients that add to those in the slices, if these are still wanted."""
        if self.updates is not None:
            self.updates.begin()
        for slot in self._slots:
            slot.arrived = False
            if slot.param.grad is None:
                slot.stand_in.pending = None
                if slot.held:
                    slot.forget()
        for bucket in self._buckets:
            bucket.begin()
        self._open, self._next = True, 0

    def begin_empty(self) -> bool:
        """Begin a pass in which this rank has no gradients, or those of no_sync() alone.

        Returns whether there is one: the other ranks may be in no_sync().
        """
        if not self._open:
            self.begin()
        return True

    def _taken(self, slot: Slot) -> Tensor | None:
        """A gradient that backward has put into `.grad`, where a placeholder takes its place."""
        grad = slot.param.grad
        if grad is slot.stand_in:
            grad, slot.stand_in.pending = slot.stand_in.pending, None
        elif grad is not None:
            slot.stand_in.pending = None
            if slot.held and not slot.arrived and not slot.aside:
                # zero_grad() of the model has dropped what was there.
                self._buckets[slot.bucket].forget(slot)
        if grad is None:
            return None
        if grad.is_sparse:
            raise TypeError(
                f"faststep.zero does not support sparse gradients, which {slot.name!r} has: use "
                "torch.nn.Embedding(sparse=False)"
            )
        slot.param.grad = slot.stand_in
        return grad.detach()

    def _send_full(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send_next()
        while self._under_way and self._under_way[0].is_there():
            self._receive_next()

    def _receive_next(self) -> None:
        bucket = self._under_way.popleft()
        bucket.receive()
        if self.updates is not None:
            self.updates.received(bucket)

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        if self.updates is not None and self.updates.beside is not None:
            self.updates.beside.make_room(MOST_UNDER_WAY - bucket.nbytes)
        # Backward would otherwise run ahead of a slow network, with all gradients in memory.
        while self._under_way and self._bytes_under_way() + bucket.nbytes > MOST_UNDER_WAY:
            self._receive_next()
        bucket.send()
        self._next += 1
        self._under_way.append(bucket)
        if self.updates is not None and self.updates.beside is not None:
            with self.updates.beside.receiving(bucket):
                self._receive_next()

    def _bytes_under_way(self) -> int:
        return sum(bucket.nbytes for bucket in self._under_way)

    def finish(self) -> None:
        """Send what is left, and wait until this rank's slices are complete; a collective."""
        if not self._open:
            return
        self._passes.clear()
        self._running.clear()
        with torch.no_grad():
            for slot in self._slots:
                if not slot.arrived and (grad := self._taken(slot)) is not None:
                    self._buckets[slot.bucket].put(slot, grad)
                    slot.arrived = True
            while self._next < len(self._buckets):
                self._send_next()
            counting = None
            if self.updates is None:
                what = "counting the parameters that were used"
                counting = self._uses(self._slots, self._group, what)
            replicas = self._group.replicas
            if replicas is not None:
                for bucket in self._under_way:
                    bucket.add()
            while self._under_way:
                self._receive_next()
            if counting is not None:
                # After the buckets, whose errors name parameters, and which some ranks have sent to
                # their replicas in backward.
                counting.replicate()
                counting.wait()
                used = counting.counts()
            if self.updates is not None:
                used = [count for bucket in self._buckets for count in bucket.used()]
                self.updates.finish()
        for slot, count in zip(self._slots, used, strict=True):
            if count:
                slot.held = True
                slot.param.grad = slot.stand_in
            slot.aside = False
        self._open = self._unsent = False
        self._shelf.clear()

    def settle(self) -> None:
        """Before the gradients are used: complete a pass, and send what no_sync() has left.

        Raises:
            RuntimeError: a backward pass has failed, or a `.grad` was set by hand.
        """
        if self._running:
            raise RuntimeError(
                "faststep.zero: a backward pass has failed after its first gradients, which are "
                "not those of the whole model: call zero_grad() and go on with the next batch; "
                "nothing was updated"
            )
        if self._unsent and not self._open:
            self.on_begin(False)
            self.begin()
        self.finish()
        for slot in self._slots:
            grad = slot.param.grad
            if grad is not None and (grad is not slot.stand_in or not slot.held):
                done = "nothing was updated" if self.updates is None else "it was not used"
                raise RuntimeError(
                    f"faststep.zero: the gradient of {slot.name!r} was set by hand, after "
                    f"backward had reduced it over the ranks; {done}"
                )

    def drop(self, set_to_none: bool) -> None:
        """Prepare for zero_grad(), which sets each `.grad` to None or to zero."""
        if self._open and self._next:
            raise RuntimeError(
                "faststep.zero: a backward pass has failed after its first buckets were sent, and "
                "the ranks are out of step: start again from a checkpoint"
            )
        if self._open and self.updates is not None:
            self.updates.abandon()
        self._open = self._unsent = False
        self._passes.clear()
        self._running.clear()
        if set_to_none:
            for slot in self._slots:
                slot.held = slot.aside = False
                slot.stand_in.pending = None

    def close(self) -> None:
        """Take the hooks away."""
        self._hooks.remove()


def _nothing(_: object) -> None:
    """What is called for optimizers that nobody joins."""


def sharded_params() -> set[int]:
    """The parameters of all sharded models, by `id`."""
    return {id(slot.param) for one in _living for slot in one._slots}


def _end(number: int) -> None:
    """Complete a backward pass for all sharded models that it has reached.

    Ranks may reach the models in different orders, and wait for each other in each.
    """
    ended = [one for one in _living if number in one._passes]
    for one in ended:
        one._running.discard(number)
    if not is_inside_backward():
        for one in sorted(ended, key=lambda gradients: gradients._made):
            one.finish()


def _hook(owner: Callable[[], Gradients | None], slot: Slot) -> Callable[[Tensor], None]:
    @disable_dynamo
    def arrived(_: Tensor) -> None:
        if (gradients := owner()) is not None:
            with torch.no_grad():
                gradients.arrived(slot)

    return arrived
