"""The loop helper that `faststep.accumulate` returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .. import _C
from .._torch.compiler import disable_dynamo
from .._torch.dtensor import any_dtensor
from .._torch.modes import is_watched
from ..clip import clip_grad_norm_
from ..grads import divide as division
from ..grads.owners import accumulating
from ..grads.params import params_of
from ..grads.total import promoted, returned
from . import saved
from .installed import Installed
from .reduction import Ranks
from .window import Window


class Accumulation:
    """Accumulates gradients over windows of micro-steps; made by :func:`faststep.accumulate`."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._installed: Installed | None = None
        self._inside = False
        self._removed = False

    @property
    def ready(self) -> bool:
        """The window is complete; its gradients wait for the step. True until the next begins."""
        return self._window.ready

    @property
    def steps(self) -> int:
        """Micro-steps of a full window."""
        return self._window.steps

    @property
    def micro_step(self) -> int:
        """Micro-steps done in the open window."""
        return self._window.micro_step

    @property
    def windows(self) -> int:
        """Windows completed so far, the empty and discarded ones included."""
        return self._window.windows

    @property
    def empty(self) -> int:
        """Windows whose tokens summed up to 0; they were dropped."""
        return self._window.empty

    @property
    def discarded(self) -> int:
        """Complete windows whose step did not happen, mostly because of an overflow."""
        return self._window.discarded()

    # ---- the loop

    @disable_dynamo
    def __enter__(self) -> Accumulation:
        self._check_usable()
        if self._installed is not None:
            raise RuntimeError("after install() the loop goes without `with accum:`")
        self._window.begin_micro_step()
        self._inside = True
        return self

    @disable_dynamo
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inside = False
        self._window.broken = True
        if kind is None:
            self._window.end_micro_step()
            self._window.broken = False
        else:
            self._window.ranks.set_quiet(False)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """`loss.backward(**kwargs)`, checked to be inside the `with` block.

        The loss is taken as it is: a mean for normalize="mean", a sum for "tokens".
        """
        if not self._inside and self._installed is None:
            raise RuntimeError("accum.backward() belongs inside `with accum:`")
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    @disable_dynamo
    def add_count(self, count: float | Tensor) -> None:
        """Add to the number of tokens that this window's loss was summed over, on this rank.

        Args:
            count: at least 0; a number or a 0-d tensor. At least once per micro-step.

        Raises:
            RuntimeError: `normalize` is not "tokens".
            ValueError: the count is negative, infinite or NaN.
        """
        window = self._window
        if window.normalize != "tokens":
            raise RuntimeError(f'add_count() is for normalize="tokens", not "{window.normalize}"')
        number = float(count)
        if not 0.0 <= number < math.inf:
            raise ValueError(f"a count of tokens must be finite and at least 0, not {number}")
        window.count += number
        window.counted = True

    @disable_dynamo
    def flush(self) -> bool:
        """Complete a window that has fewer micro-steps, as at the end of the data.

        "mean" then divides by the micro-steps that there were. With DistributedDataParallel every
        rank must call this (a collective), also those without a micro-step in the window. After
        `install` it takes the step as well, with all calls that were left out.

        Returns:
            `ready`: False if there was nothing to complete.
        """
        self._check_usable()
        window = self._window
        if self._installed is not None:
            self._installed.check_flush()
        elif window.ready:
            window.close()
        if window.sums is not None:
            window.sums.collect(last=True)
        if window.micro_step:
            window.check_marks("before flush()")
        if window.micro_step or window.ranks.world > 1:
            window.finish(synchronized=False)
        ready = window.ready
        if self._installed is not None and ready:
            self._installed.take_steps()
        return ready

    @disable_dynamo
    def reset(self) -> None:
        """Drop the open window and its gradients, as after an exception inside a `with` block."""
        window = self._window
        window.drop_grads()
        window.close(counts=False)
        window.broken = self._inside = False
        window.ranks.set_quiet(False)
        if self._installed is not None:
            self._installed.restart()

    # ---- gradients between the window's end and the step

    @disable_dynamo
    def normalize_(self) -> None:
        """Divide the gradients in place now, in a pass of its own, instead of inside the step.

        For whatever reads or changes `.grad` before the step. Does nothing a second time.
        """
        if not self.ready:
            raise RuntimeError("normalize_() needs a complete window (accum.ready)")
        for optimizer in self._window.optimizers:
            division.divide(optimizer)

    @disable_dynamo
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the window's gradients, those of all optimizers, by their common norm.

        `torch.nn.utils.clip_grad_norm_` on the divided gradients; but only one pass that measures:
        division and clip coefficient are both left to the step. With a GradScaler call
        `scaler.unscale_(optimizer)` before.

        Args:
            max_norm: the largest norm allowed.
            norm_type: order of the norm. Default: 2.0.
            error_if_nonfinite: raise if the norm is NaN or infinite. Default: False.

        Returns:
            The norm before clipping, 0-d, in the promoted dtype of the gradients.
        """
        if not self.ready:
            raise RuntimeError("clip_grad_norm_() needs a complete window (accum.ready)")
        optimizers = self._window.optimizers
        for optimizer in optimizers:
            self._window.steps_taken.repeat_division(optimizer)
        divisors = {division.divisor_of(optimizer) for optimizer in optimizers}
        params = [param for optimizer in optimizers for param in params_of(optimizer)]
        grads = _C.collect_grads(params)
        divisor = divisors.pop()
        apart = any_dtensor(params) or is_watched() or not _C.fusable(grads)
        if divisors or divisor is None or norm_type == 0.0 or apart:
            self.normalize_()
            return clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        norm, dtypes = _C.norm(grads, float(norm_type))
        norm /= divisor
        wide = torch.tensor(norm, dtype=torch.float64, device="cpu")
        rounded = returned(wide, promoted(dtypes), float(norm_type), error_if_nonfinite)
        coefficient = max_norm / (norm + 1e-6)
        if not coefficient >= 1.0:
            for optimizer in optimizers:
                division.defer(optimizer, divisor / coefficient if coefficient else math.inf)
        return rounded

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """The open window: counters, and the sums so far in the order of the parameters.

        The gradients are not copied: save or copy before the next micro-step. With several ranks
        each has a state of its own.

        Raises:
            RuntimeError: inside a micro-step; after one that raised, until `reset`; or between
                `scaler.unscale_` and `scaler.step` of an installed loop.
        """
        if self._inside:
            raise RuntimeError("state_dict() inside `with accum:`: a micro-step is under way")
        self._window.check_whole()
        if self._installed is not None:
            self._installed.check_visible()
        return saved.state_of(self._window)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on inside the window that `state_dict` describes, with the same bits.

        Raises:
            ValueError: it lacks something, or is of another `steps` or `normalize`, of other
                parameters or another number of optimizers. Nothing has changed then.
        """
        self._check_usable()
        saved.restore(self._window, state_dict)
        if self._installed is not None:
            self._installed.restart()

    # ---- hooks in place of a changed loop

    def install(
        self,
        *,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] = (),
    ) -> Accumulation:
        """Let an unchanged loop accumulate: see docs/accumulation.md.

        From now on `optimizer.step`, `scaler.step` and `scaler.unscale_` end a micro-step. They act
        at the end of each window only; until then they return None (`optimizer.step` the loss, if
        it was given a closure). `scaler.update`, `scheduler.step` and `optimizer.zero_grad` do
        nothing inside a window. `remove()` undoes it.

        Args:
            scaler: the GradScaler of the loop, if it has one.
            scheduler: the learning-rate schedulers that step once per optimizer step.
        """
        self._check_usable()
        if self._installed is not None or self.micro_step or self.ready:
            raise RuntimeError("install() must be called once, and not inside a window")
        schedulers = [scheduler] if isinstance(scheduler, LRScheduler) else list(scheduler)
        self._installed = Installed(self._window, scaler, schedulers)
        return self

    def remove(self) -> None:
        """Take all hooks away. The gradients of an open window are dropped."""
        if self._removed:
            return
        window = self._window
        if self._installed is not None:
            self._installed.remove()
            self._installed = None
        if window.micro_step or window.broken:
            window.drop_grads()
        window.close(counts=False)
        window.ranks.set_quiet(False)
        window.undo()
        for optimizer in window.optimizers:
            accumulating.pop(optimizer)
        window.optimizers.clear()
        window.model = window.sums = None
        window.ranks = Ranks(None)
        self._removed = True

    def _check_usable(self) -> None:
        if self._removed:
            raise RuntimeError("this accumulation was removed; call faststep.accumulate() again")
        if self._inside:
            raise RuntimeError("inside `with accum:` already: a micro-step is under way")
        self._window.check_whole()
