"""update="backward": a bucket is updated and gathered while backward goes on with earlier layers.

When a bucket is sent, backward has accumulated the gradients of all its parameters on this rank. So
every node of the graph that hands a gradient to one of them has run, and has read the values that
it saved. The parameters may be written from then on. What may still read them is:

- A node that saved a parameter without handing it a gradient (`weight.detach()`), a second pass
  through a retained graph, or a backward of the backward. Their saved tensors share the parameter's
  version counter, which moves before its memory is written. So autograd raises its error for
  tensors that were modified in place.
- A forward that is repeated within backward (activation checkpointing), of a module whose
  parameters need no gradient there. Such a module is found when it is called.

Reduced buckets are looked for in the hooks of later parameters. A thread would need locks around
all of this, and a core that backward could use. On a CUDA device a second stream waits for each
bucket, updates it and has it gathered, as soon as it is sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..._torch.compiler import disable_dynamo
from ..._torch.optim import increment_version
from ...optim.request import Rule, StepAnswer, StepRequest
from ..layout.slots import Slot
from ..step.owned import OwnedPart, set_grads
from .beside import Beside
from .gradient_buckets import GradientBucket

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["REFUSED_CLIPPING", "REFUSED_SCALER", "BackwardUpdates", "refuse_request"]


class BackwardUpdates:
    """Updates the buckets of an engine during its backward passes."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine = weakref.ref(engine)
        self._rules: list[Rule] | None = None  # of the pass, until the step
        self._written: set[int] = set()  # buckets of the pass that has begun, by their number
        self._watch: Any = None  # the hook on all modules while parameters are written
        # On a CUDA device buckets are updated and gathered by a stream beside that of backward.
        self.beside = Beside(device) if device.type == "cuda" else None

    def follow_groups(self) -> None:
        """Learn which parameters the groups have, in which buckets."""
        engine = self._owner
        self._numbers = {id(bucket): number for number, bucket in enumerate(engine.buckets)}
        self._parts: list[OwnedPart] = [engine.owned.part(b.slots) for b in engine.buckets]
        self._slot_of = {id(slot.param): slot for slot in engine.slots}

    def refuse_regrouping(self) -> None:
        """Raise RuntimeError for groups that have other parameters than when backward used them."""
        if self._rules is not None:
            raise RuntimeError(
                "the parameter groups were changed between backward and optimizer.step(): with "
                'update="backward" backward has updated the parameters already, as they were. '
                "Change them before backward"
            )

    @property
    def _owner(self) -> Engine:
        engine = self._engine()
        assert engine is not None  # hooks of gradients are gone with it
        return engine

    def begin(self) -> None:
        """Before the first gradient of a pass: everything that can be checked before an update.

        Raises:
            RuntimeError: the pass before has updated the parameters, and no step followed; a
                parameter was moved.
        """
        if self._rules is not None:
            raise RuntimeError(
                'a second backward before optimizer.step(): with update="backward" the first one '
                "has updated the parameters. To accumulate, run all backward passes of a step but "
                "the last inside `with optimizer.no_sync():`"
            )
        engine = self._owner
        engine.follow_groups()
        engine.follow_moves()
        if self.beside is not None:  # it may read and write what backward writes from now on
            self.beside.end()
        self._rules = engine.owned.take_options()

    def received(self, bucket: GradientBucket, is_wanted: bool) -> None:
        """Update a bucket whose slice is complete, and send it to the other ranks.

        Raises:
            RuntimeError: the pass has failed on another rank.
        """
        engine, number = self._owner, self._numbers[id(bucket)]
        assert self._rules is not None
        assert bucket.uses is not None
        if not is_wanted:
            if not bucket.uses.failed():
                self._written.add(number)  # by other ranks
            return
        bucket.uses.refuse_failed()
        engine.wait([number])  # the gathering of the step before, if no forward has waited for it
        for slot, count in zip(bucket.slots, bucket.used(), strict=True):
            slot.held = slot.held or bool(count)
        held = [slot.held for slot in bucket.slots]
        if not any(held):
            return
        self._watch_modules()
        self._written.add(number)
        increment_version([slot.param for slot in bucket.slots if slot.held])
        set_grads(bucket.slots, held)
        self._parts[number].step(self._rules)
        engine.start_gather(number)

    def finish(self) -> None:
        """At the end of a pass, when all buckets are under way."""
        self.stop_watching()
        engine = self._owner
        if self.beside is not None:
            self.beside.end()
        if engine.waits is None:
            engine.wait(None)

    def abandon(self) -> None:
        """After a pass that failed: the next one may begin.

        Raises:
            RuntimeError: a parameter was updated in it.
        """
        if self._written:
            raise RuntimeError(
                'faststep.zero: a backward pass has failed after update="backward" had updated '
                "parameters by its first gradients: start again from a checkpoint"
            )
        self._rules = None
        self.stop_watching()

    def end_step(self, request: StepRequest) -> StepAnswer:
        """What is left for `step`: to check that backward did what the step is asked for.

        Raises:
            RuntimeError: options have changed since backward, a `.grad` was set to None, or the
                step is asked for what only the gradients of all parameters can tell.
        """
        refuse_request(request)
        engine = self._owner
        engine.gradients.settle()
        engine.follow_moves()  # that saw memory which backward has let go of since
        known = len(engine.buckets)
        engine.follow_groups()
        rules, self._rules = self._rules, None
        if engine.waits is not None:
            engine.waits.learn()
        if rules is None:
            return StepAnswer(False, None)
        for slot in engine.slots:
            if slot.held and slot.param.grad is None:
                raise RuntimeError(
                    f"faststep.zero: the gradient of {slot.name!r} was taken away after backward: "
                    'with update="backward" backward has updated the parameter by it already'
                )
        for number, (then, now) in enumerate(zip(rules, engine.owned.take_options(), strict=True)):
            if then != now:
                raise RuntimeError(
                    f"the learning rate or another number of group {number} was changed between "
                    'backward and optimizer.step(): with update="backward" backward has updated '
                    "the parameters already, with the number of before. Change it before backward"
                )
        for number in range(known, len(engine.buckets)):  # of parameters unfrozen before backward
            slots = engine.buckets[number].slots
            set_grads(slots, [slot.is_present for slot in slots])
            self._parts[number].step(rules)
            increment_version([slot.param for slot in slots if slot.is_present])
            engine.start_gather(number)
        if engine.waits is None:
            engine.wait(None)
        return StepAnswer(False, None)

    def refuse_change(self, name: str) -> None:
        """Raise RuntimeError for a change of a gradient that backward has used."""
        if self._rules is not None:
            raise RuntimeError(
                f"faststep.zero: the gradient of {name!r} cannot be changed: with "
                'update="backward" backward has updated the parameter by it already'
            )

    # ---- modules that are called within backward

    def _watch_modules(self) -> None:
        """Until the pass ends: look at each module that is called."""
        if self._watch is None:
            self._watch = register_module_forward_pre_hook(_hook(weakref.ref(self)))

    def stop_watching(self) -> None:
        """When no parameter is written any more."""
        self._written.clear()
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def called(self, module: nn.Module) -> None:
        """Called before a module's forward within backward."""
        for param in module._parameters.values():
            slot: Slot | None = self._slot_of.get(id(param))
            if slot is not None and slot.param is param and slot.bucket in self._written:
                raise RuntimeError(
                    f"{slot.name!r} is used by a forward within backward, after "
                    'update="backward" has updated it: the recomputed activations would not be '
                    'those of the forward pass. Use update="step", or leave this module out of '
                    "activation checkpointing"
                )


def refuse_request(request: StepRequest) -> None:
    """Raise RuntimeError for a step that clips or unscales."""
    if request.max_norm is not None:
        raise RuntimeError(REFUSED_CLIPPING)
    if request.grad_scale is not None or request.found_inf is not None or request.looks_for_inf:
        raise RuntimeError(REFUSED_SCALER)


REFUSED_SCALER = (
    'update="backward" cannot work with a GradScaler: whether a gradient is infinite is known when '
    "backward ends, and the parameters were updated before. Train in bfloat16 without a scaler, or "
    'use update="step"'
)
REFUSED_CLIPPING = (
    'update="backward" cannot clip by the global norm: it is known when backward ends, and the '
    'parameters were updated before. Use update="step"'
)


def _hook(owner: Callable[[], BackwardUpdates | None]) -> Callable[..., None]:
    @disable_dynamo
    def called(module: nn.Module, *_: Any) -> None:
        if (updates := owner()) is not None:
            updates.called(module)

    return called
