"""A window of micro-steps: when it begins and ends, and what happens to its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..grads import divide as division
from ..grads.buckets import reducing_model
from ..grads.owners import accumulating
from ..grads.params import name_of, params_of
from ..optim.base import FusedOptimizer
from .marks import Mark, mark_of
from .reduction import ranks_of
from .steps import StepHooks, Steps
from .sums import LOW_PRECISION, Sums

Normalize = Literal["mean", "sum", "tokens"]


class Window:
    """The state of a window; `Accumulation` is the public class."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        steps: int,
        model: nn.Module | None,
        normalize: Normalize,
        dtype: torch.dtype | None,
        in_pairs: bool,
    ) -> None:
        self.steps = steps
        self.normalize = normalize
        self.ready = False
        self.micro_step = 0
        self.windows = 0
        self.empty = 0
        self.skipped = 0  # complete windows without a step, the last window not counted
        self.count = 0.0  # tokens of the window
        self.counted = False  # in this micro-step
        self.broken = False
        self.model = model
        self._model_checked = False
        self.ranks = ranks_of(optimizers[0], model)
        self.optimizers = list(optimizers)
        self.sums = None if dtype is None else Sums(in_pairs)
        self.steps_taken = Steps(self.optimizers)
        self._marks: list[Mark] = []
        if self.sums is not None:
            self._attach_sums(self.sums)
        self._hooks = [StepHooks(o, self.before_step, self.after_step) for o in optimizers]
        for optimizer in optimizers:
            accumulating.set(optimizer, self)
        self.undo = weakref.finalize(self, _undo, self._hooks, self.sums)
        self.undo.atexit = False

    def discarded(self) -> int:
        """Complete windows whose step did not happen; with the last one, once steps were called."""
        taken = self.steps_taken
        return self.skipped + int(self.ready and taken.are_all() and taken.were_skipped())

    def named_params(self) -> list[tuple[str, Tensor]]:
        """All parameters with their names: those of the optimizers, then the model's others."""
        names = {id(p): name for name, p in self.model.named_parameters()} if self.model else {}
        found: dict[int, tuple[str, Tensor]] = {}
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                whose = "" if group.get("param_names") else f" of {type(optimizer).__name__}"
                for index, param in enumerate(group["params"]):
                    name = name_of(optimizer, number, index) + whose
                    found.setdefault(id(param), (repr(names.get(id(param), name)), param))
        for name, param in self.model.named_parameters() if self.model else ():
            if param.requires_grad:
                found.setdefault(id(param), (repr(name), param))
        return list(found.values())

    # ---- micro-steps

    def check_model(self) -> None:
        """Raise if an unknown DistributedDataParallel reduces the gradients; looks only once."""
        if self._model_checked or self.ranks.knows_model:
            return
        if reducing_model(param for _, param in self.named_params()) is not None:
            raise TypeError(
                "a DistributedDataParallel model reduces these gradients in every backward, and "
                "accumulate() was not given it: pass model= the DistributedDataParallel itself, "
                "not the module inside"
            )
        self._model_checked = True

    def begin_micro_step(self) -> None:
        """Before a forward pass."""
        if self.model is not None or self.sums is not None:
            self.check_model()
        if self.ready or self.micro_step == 0:
            self.begin_window()
        else:
            self.check_marks("between micro-steps")
            if self.sums is not None:
                self.sums.release_grads()
        self.quiet_ranks()

    def quiet_ranks(self) -> None:
        """Let the next micro-step communicate only if it completes the window."""
        last = self.micro_step % self.steps == self.steps - 1
        self.ranks.set_quiet(not last or bool(self.sums))
        if self.sums is not None:
            self.sums.expect(last)

    def _attach_sums(self, sums: Sums) -> None:
        """Sum up the gradients of new parameters too."""
        params = self.named_params()
        for name, param in params:
            if self.ranks.keeps_sums and param.dtype in LOW_PRECISION:
                raise TypeError(
                    f"accumulate(dtype=torch.float32) cannot sum up the gradients of {name} in "
                    "FSDP2: leave model= away, so that each micro-step reduces its gradients, "
                    "whose parts are added up in float32"
                )
        sums.attach(params)

    def begin_window(self) -> None:
        """Close the last window and start an empty one."""
        if self.micro_step == 0 and any(mark.change() is None for mark in self._marks):
            raise RuntimeError(
                "a new accumulation window begins, but the gradients of the last one are still "
                "there: call optimizer.zero_grad() after the step"
            )
        self._marks.clear()
        self.close()
        if self.sums is not None:
            self._attach_sums(self.sums)
            self.sums.begin_window()

    def end_micro_step(self) -> None:
        """After a backward pass; completes the window if it was the last one."""
        self.ranks.set_quiet(False)
        if self.normalize == "tokens" and not self.counted:
            raise RuntimeError(
                'normalize="tokens": add_count() was not called in this micro-step; say how many '
                "tokens its loss is a sum over, 0 if there are none"
            )
        self.counted = False
        if self.sums is not None:
            self.sums.collect(last=self.micro_step + 1 == self.steps)
        self.micro_step += 1
        if self.micro_step == self.steps:
            self.finish(synchronized=not self.sums)
        else:
            self.mark()

    def finish(self, synchronized: bool) -> None:
        """Make the window's sum whole over all ranks, and leave its division to the step.

        Args:
            synchronized: DistributedDataParallel has averaged the gradients in backward already.
        """
        divisor = self._reduce(synchronized)
        self.micro_step, self.count = 0, 0.0
        if self.sums is not None:
            self.sums.end_window()
        if divisor is None:
            return
        self.windows += 1
        if divisor == 0.0:
            self.empty += 1
            self.drop_grads()
            return
        self.ready = True
        for optimizer, hooks in zip(self.optimizers, self._hooks, strict=True):
            hooks.come_last(optimizer)
            if self.sums and not isinstance(optimizer, FusedOptimizer):
                params = params_of(optimizer)
                rest = [p.grad for p in params if p.grad is not None and p not in self.sums]
                self.sums.round(params, 1.0 / divisor)
                division.scale(rest, 1.0 / divisor)
            else:
                division.defer(optimizer, divisor)
        self.mark()

    def _reduce(self, synchronized: bool) -> float | None:
        """Reduce what no backward has reduced; the divisor, or None if no rank did anything."""
        world = self.ranks.world
        if synchronized:
            self.ranks.synchronized()
        if synchronized or world == 1:
            if self.normalize == "tokens":
                return self.ranks.total([self.count])[0] / world
            return float(self.micro_step) if self.normalize == "mean" else 1.0
        if self.ranks.reduces:
            self.ranks.reduce()
            micro_steps, count = self.ranks.total([float(self.micro_step), self.count])
            divisor = {"sum": world, "tokens": count, "mean": micro_steps}[self.normalize] / world
            return divisor if micro_steps else None
        return self._add_up_over_ranks()

    def _add_up_over_ranks(self) -> float | None:
        """Add up the gradients of all ranks; the divisor, or None if no rank did anything."""
        params = [param for _, param in self.named_params() if param.requires_grad]
        mine = self.micro_step > 0  # else `.grad` is of the window before
        has = [float(mine and param.grad is not None) for param in params]
        micro_steps, count, *has = self.ranks.total([float(self.micro_step), self.count, *has])
        if micro_steps == 0.0:
            return None
        if not mine:
            self.drop_grads()
        used = [param for param, somewhere in zip(params, has, strict=True) if somewhere]
        for name, param in self.named_params():
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise TypeError(f"accumulate() cannot add up the sparse gradient of {name}")
        for param in used:
            if param.grad is None:  # only other ranks have used it
                zeros = torch.zeros_like(param, requires_grad=False)
                if self.sums is None or not self.sums.put(param, zeros):
                    param.grad = zeros
        world = float(self.ranks.world)
        divisor = {"sum": world, "tokens": count, "mean": micro_steps}[self.normalize]
        sums = [param.grad for param in used if param.grad is not None]
        self.ranks.add_up(sums)
        return divisor

    # ---- between windows

    def check_whole(self) -> None:
        """Raise until `reset()` if the last micro-step failed."""
        if self.broken:
            raise RuntimeError(
                "the last micro-step raised, and its gradients may be half added: call "
                "accum.reset() to drop the window"
            )

    def close(self, counts: bool = True) -> None:
        """End the complete window, whether there was a step or not."""
        for optimizer in self.optimizers:
            division.settle(optimizer)
        if self.ready and counts and self.steps_taken.were_skipped():
            self.skipped += 1
        self.steps_taken.forget()
        self.ready = False

    def drop_grads(self) -> None:
        """Remove the gradients of the open window."""
        if self.sums is not None:
            self.sums.forget()
        for _, param in self.named_params():
            param.grad = None
        self.ranks.drop()
        self._marks.clear()
        self.micro_step, self.count, self.counted = 0, 0.0, False

    def mark(self) -> None:
        """Mark one gradient per parameter group."""
        self._marks = []
        if self.sums is not None:
            self.sums.mark()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                first = next((p for p in group["params"] if p.grad is not None), None)
                if first is not None and (mark := mark_of(first)) is not None:
                    self._marks.append(mark)

    def check_marks(self, when: str) -> None:
        """Raise if gradients were changed or cleared since `mark`."""
        if self.sums is not None and self.sums.came_since_mark():
            raise RuntimeError(
                f"gradients came {when} of an accumulation window, from a backward pass that is no "
                "micro-step of it"
            )
        for mark in self._marks:
            if (what := mark.change()) is not None:
                raise RuntimeError(
                    f"gradients were {what} {when} of an accumulation window (zero_grad or "
                    "clipping in each micro-step?): do it once per window, when accum.ready is "
                    "true; after install() clip with max_grad_norm= of the optimizer"
                )

    # ---- the optimizers' step

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raise if this step would use half a window."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None) is not None
        if self.micro_step and not self.ready:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() after {self.micro_step} of {self.steps} "
                "micro-steps: wait until accum.ready is true, or call accum.flush()"
            )
        if self.ready and closure and not self.steps_taken.has(optimizer):
            raise RuntimeError(
                "a closure computes new gradients, which are no sum over a window: call step() "
                "without one"
            )
        if not closure:
            self.steps_taken.repeat_division(optimizer)
        division.check(optimizer)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note what the step of a complete window did."""
        if self.ready:
            self.steps_taken.note(optimizer)
            self.mark()


def _undo(hooks: list[StepHooks], sums: Sums | None) -> None:
    for of_step in hooks:
        of_step.remove()
    if sums is not None:
        sums.remove()
