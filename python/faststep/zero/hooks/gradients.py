"""Gradients on their way from backward to the slices of the ranks.

A hook on each parameter copies its gradient into a bucket. Full buckets are sent at once, in one
order on every rank: a bucket waits for those before it. When backward ends, the other buckets are
sent, with zeros for parameters that this rank did not use; the ranks then add up in how many of
them each parameter was used, and wait for all buckets. So after backward `.grad` is set on all
ranks or on none.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..._torch.ddp import after_backward, current_backward, is_inside_backward
from ...grads.hooks import Hooked, weakly
from ..layout.placeholder import Placeholder
from ..layout.slots import Slot
from ..transport.group import Group
from .reducer import Reducer
from .unowned import Unowned, can_be_trained

_made = itertools.count()
_living: weakref.WeakValueDictionary[int, Gradients]  # of all sharded models, in the same order
_living = weakref.WeakValueDictionary()

HAS_FAILED = (
    "faststep.zero: a backward pass has failed, and the gradients are not those of the whole model "
    "on all ranks: call zero_grad() and go on with the next batch"
)
REACHES_TWO = (
    "faststep.zero: one backward pass reaches two models that were sharded over the same "
    "process_group, where their messages could change places: give each a "
    "torch.distributed.new_group() of its own"
)


class State(enum.Enum):
    """The state of gradients since the last zero_grad(); docs/decisions/zero.md has the events."""

    IDLE = enum.auto()  # there are none
    # This rank has some that were not all reduced: those of a backward pass that is under way, or
    # that no_sync() has left.
    COLLECTING = enum.auto()
    REDUCED = enum.auto()  # the slices have the sums of all ranks
    FAILED = enum.auto()  # a backward pass did not end, here or on another rank


class Gradients:
    """The hooks of one model, and its buckets."""

    is_wrapped = False  # whether forwards of DistributedDataParallel say which pass is reduced
    expects_backward = True

    def __init__(self, slots: list[Slot], reducer: Reducer, group: Group) -> None:
        self.slots = slots
        self._reducer = reducer
        self.group = group
        self._state = State.IDLE
        self.passes: set[int] = set()  # under way: a backward, and those inside of it
        self._number: int | None = None  # of the pass, whose gradients have begun to arrive
        self._quiet = 0  # nested no_sync() contexts
        self._hooks: Hooked[Slot] = Hooked()
        self.changes = 0  # of the slices
        # Called when a pass begins to send, with False if it is the step that sends.
        self.on_begin: Callable[[bool], object] = lambda is_backward: None
        # After a pass with gradients of parameters without a sharded optimizer.
        self.on_unowned: Callable[[], object] = lambda: None
        # With what is about to be sent beside backward and step.
        self.before_exchange: Callable[[str], object] = lambda what: None
        self.unowned = Unowned([], group, lambda: None)
        self.made = next(_made)  # the same on all ranks, as shard() is a collective
        _living[self.made] = self

    @property
    def is_collecting(self) -> bool:
        """True if gradients have still to be reduced."""
        return self._state is State.COLLECTING

    def settle_pass(self) -> None:
        """Before a change of the buckets: complete a pass whose end was not seen."""
        self._recover()
        self._refuse_inside("new parameters")
        if self._number is not None:
            self.finish()

    def take_in(self, slots: Sequence[Slot]) -> None:
        """Collect the gradients of more parameters, and take over those that they have.

        A collective. What no_sync() has left stays for the next pass, which sends it.
        """
        params = [slot.param for slot in slots]
        if self._state is not State.COLLECTING:
            self.unowned.reduce(params)
            for slot in slots:
                grad = slot.param.grad  # or one that was dropped with another optimizer
                if grad is not None and not isinstance(grad, Placeholder):
                    slot.take_over(grad)
        self.hook(slots)

    def hook(self, slots: Sequence[Slot]) -> None:
        """Collect the gradients of more parameters."""
        arrived = weakly(self._arrived)
        for slot in slots:
            self._hooks.add(slot.param, slot, arrived)
        for one in _living.values():
            one.unowned.leave([slot.param for slot in slots])

    def reduce_also(self, params: Iterable[Tensor]) -> None:
        """Reduce the gradients of parameters that no sharded optimizer has, too.

        Those of frozen ones too, from when they are trained.
        """
        known = sharded_params().union(*(one.unowned.ids() for one in _living.values()))
        free = [param for param in params if id(param) not in known and can_be_trained(param)]
        self.unowned = Unowned(free, self.group, weakly(self._note_pass))

    # ---- what begins a pass

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward leaves gradients on this rank; the next one outside sends their sums."""
        self.keep_local()
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def keep_local(self) -> None:
        """Before backward passes that leave their gradients on this rank."""
        self._recover()
        if self._number is not None and not self.passes:
            self.finish()
        self._state = State.COLLECTING

    def _arrived(self, param: Tensor) -> None:
        """The hook of a parameter whose gradient is in `.grad`."""
        if not self._note_pass():
            held = param.grad
            if isinstance(held, Placeholder) and held.pending is not None:
                held.pending = held.pending.detach().clone()  # autograd may use that memory again
            return
        slot = self._hooks.of(param)
        if slot is None or (grad := slot.taken()) is None:
            return
        came_before = slot.arrived
        if came_before and self._reducer.has_sent(slot):
            raise RuntimeError(
                f"faststep.zero: the gradient of {slot.name!r} came twice in one backward "
                "pass, and its bucket was sent after the first time: reentrant checkpoints "
                "share the parameter. Use torch.utils.checkpoint with use_reentrant=False"
            )
        self._reducer.put(slot, grad)
        if not came_before:
            self._reducer.send_full()

    def _note_pass(self) -> bool:
        """Begin a pass at its first gradient; returns whether it is one that is reduced."""
        if self._quiet or not self.expects_backward:
            if self._state is not State.FAILED:
                self._state = State.COLLECTING
            return False
        number = current_backward()
        if number in self.passes:
            return True
        for other in _living.values():
            if number in other.passes and other.group.process_group is self.group.process_group:
                raise RuntimeError(REACHES_TWO)
        if self.passes and not is_inside_backward():
            self._fail()  # the pass before, whose end was not seen
        self._recover()
        if self._number is None:
            self.on_begin(True)
            self._begin(number)
        self.passes.add(number)
        after_backward(lambda: _end(number))
        return True

    @torch.no_grad()
    def _begin(self, number: int) -> None:
        """Start to collect gradients that add to those in the slices, if these are still wanted."""
        for slot in self.slots:
            slot.begin_pass()
        self._take_back()
        self._reducer.begin()
        self.expects_backward = True
        self._state, self._number = State.COLLECTING, number

    def begin_without_data(self) -> None:
        """Begin a pass in which this rank has no gradients, or those of no_sync() alone.

        What the slices hold is of the last step.
        """
        self._recover()
        for slot in self.slots:
            if slot.held:
                slot.forget()
        self._begin(-1)

    # ---- what ends a pass

    def finish(self) -> None:
        """Send what is left, and wait until this rank's slices are complete; a collective."""
        self.passes.clear()
        try:
            with torch.no_grad():
                for slot in self.slots:
                    if not slot.arrived and (grad := slot.taken()) is not None:
                        self._reducer.put(slot, grad)
                used = self._reducer.complete(
                    waits=self.unowned.are_trained(), says=bool(self.unowned.touched)
                )
                if reduces := bool(self.unowned) and not self._reducer.took_all:
                    self.unowned.reduce()
        except BaseException:
            self._fail()
            raise
        for slot, count in zip(self.slots, used, strict=True):
            if count:
                slot.held = True
                slot.param.grad = slot.stand_in
        self._state, self._number = State.REDUCED, None
        self.expects_backward = not self.is_wrapped
        if reduces:
            self.on_unowned()

    def note_failure(self) -> None:
        """Outside of backward: a pass whose end was not seen has failed."""
        if self.passes and current_backward() < 0:
            self._fail()

    def _fail(self) -> None:
        self._state = State.FAILED
        self.passes.clear()
        self.expects_backward = not self.is_wrapped

    def _recover(self) -> None:
        """After a pass that has failed: forget it, if the script has dropped its gradients.

        A collective if other ranks may wait for this one, which lets them know that it has failed.
        """
        self.note_failure()
        if self._state is not State.FAILED:
            return
        if any((s.arrived or s.held) and s.stand_in.is_same(s.param.grad) for s in self.slots):
            raise RuntimeError(HAS_FAILED)
        for slot in self.slots:
            slot.drop()
            if slot.stand_in.is_same(slot.param.grad) and slot.stand_in.pending is None:
                slot.param.grad = None
        with torch.no_grad():
            if self._number is not None:
                self._reducer.complete(has_failed=True)
            self._reducer.drop()
        self._state, self._number = State.IDLE, None

    def complete(self, what: str = "step()") -> None:
        """Before `what` uses slices: complete a pass, and send what no_sync() has left.

        Raises RuntimeError if a backward pass has failed, or runs.
        """
        self.note_failure()
        if self._state is State.FAILED:
            raise RuntimeError(f"{HAS_FAILED}; nothing was updated")
        self._refuse_inside(what)
        if self._state is State.COLLECTING:
            if self._number is None:
                self.on_begin(False)
                self._begin(-1)
            self.finish()

    def settle(self) -> None:
        """Before all gradients are used: let the slices have them, those too that a script has set.

        A gradient that is set by hand is taken as it is, the same on all ranks.
        """
        self.complete()
        grads = [(s, s.param.grad) for s in self.slots if not s.is_present]
        read = [(s, g.clone() if isinstance(g, Placeholder) else g) for s, g in grads]
        for slot, grad in read:  # those of two parameters may have been exchanged
            if grad is not None:
                slot.take_over(grad)
        self._take_back()

    def _take_back(self) -> None:
        """Before slices are written: let them have what a script has written to whole gradients."""
        for slot in self.slots:
            slot.take_back()
        self.changes += 1

    def begin_drop(self) -> None:
        """Before zero_grad()."""
        self.note_failure()
        self._refuse_inside("zero_grad()")
        if self._state is State.COLLECTING and self._number is not None:
            self._fail()  # or its end was not seen: it was not completed

    def drop(self, set_to_none: bool) -> None:
        """After zero_grad(), which has set each `.grad` of the groups to None or to zero."""
        has_failed = self._state is State.FAILED
        dropped = [s for s in self.slots if has_failed or (set_to_none and s.param.grad is None)]
        are_all = len(dropped) == len(self.slots)
        for slot in dropped:
            if slot.held and not are_all:  # the next pass adds to what is beside it
                slot.forget()
            slot.drop()
            slot.stand_in.pending = None
        self.changes += 1
        self._recover()
        if are_all and set_to_none:
            self._state = State.IDLE

    def zero(self, slot: Slot) -> None:
        """Set a gradient to zero, on this rank; after a failed pass, drop it."""
        self.note_failure()
        if self._state is State.FAILED:
            slot.held = slot.arrived = False
        self.changes += 1
        slot.make_zero()

    @property
    def is_local(self) -> bool:
        """True if a script that uses a gradient now wants this rank's, as no_sync() leaves it."""
        is_quiet = self._quiet > 0 or self.is_wrapped
        return self.is_collecting and self._number is None and is_quiet

    def _refuse_inside(self, what: str) -> None:
        if self.passes:
            raise RuntimeError(f"faststep.zero: {what} inside of a backward pass; nothing was done")


def sharded_params() -> set[int]:
    """The parameters of all sharded models of this process, by `id`."""
    return {id(slot.param) for one in _living.values() for slot in one.slots}


def _end(number: int) -> None:
    """Complete a backward pass for all sharded models that it has reached.

    Ranks may reach the models in different orders, and wait for each other in each. The end of a
    pass that is inside of another is not that of the other, of which nobody hears if all gradients
    came inside: the next use of the gradients completes it.
    """
    ended = [one for one in _living.values() if number in one.passes]
    for one in ended:
        one.passes.discard(number)
    if not is_inside_backward():
        for one in ended:
            one.finish()
