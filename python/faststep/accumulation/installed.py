"""accum.install(): replaced methods of optimizer, scaler and schedulers, for unchanged loops."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._torch.compiler import disable_dynamo
from ..amp.protocol import AskedToUnscale
from ..grads import divide as division
from ..grads.params import params_of
from ..optim.base import FusedOptimizer
from ..optim.step import loss_of
from .marks import Mark, mark_of
from .window import Window

_Method = Callable[..., Any]


class Installed:
    """The replaced methods. They call the originals at the end of a window.

    Inside a window they do not call them: `step` and `unscale_` end the micro-step, and the others
    do nothing. A micro-step ends with the first call of `scaler.unscale_`, `scaler.step` or
    `optimizer.step` after a backward pass. The same calls for further optimizers belong to that
    micro-step.
    """

    def __init__(
        self, window: Window, scaler: torch.amp.GradScaler | None, schedulers: Sequence[LRScheduler]
    ) -> None:
        self._window = window
        self._scaler = scaler
        self._schedulers = list(schedulers)
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # object, name, ours, its own before
        self._handles: list[Any] = []
        self._active = True
        self._passing = False  # a step is taken: all methods call the originals
        self._ended = self._unscales = False
        self._stepped: set[int] = set()  # optimizers whose step was called in this micro-step
        self._uncleared: set[int] = set()  # optimizers that wait for zero_grad
        self._hidden: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._marks: dict[int, Mark] = {}  # of gradients as backward left them
        for optimizer in window.optimizers:
            self._replace(optimizer, "step", self._step)
            self._replace(optimizer, "zero_grad", self._zero_grad)
            if isinstance(optimizer, FusedOptimizer):  # a scaler that is not known then raises
                self._handles.append(AskedToUnscale(optimizer))
        if scaler is not None:
            self._replace(scaler, "step", self._scaler_step)
            self._replace(scaler, "unscale_", self._unscale)
            self._replace(scaler, "update", self._when_ready)
        for scheduler in schedulers:
            self._replace(scheduler, "step", self._when_ready)
        self._watch_backward()
        window.begin_window()
        window.quiet_ranks()

    def _replace(self, owner: Any, name: str, act: _Method) -> None:
        inner = getattr(owner, name)

        @disable_dynamo
        @functools.wraps(inner)
        def method(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active or self._passing:
                return inner(*args, **kwargs)
            return act(inner, owner, *args, **kwargs)

        before = vars(owner).get(name)
        # A bound method: schedulers that are made later expect that of optimizer.step.
        ours = types.MethodType(method, owner)
        setattr(owner, name, ours)
        self._replaced.append((owner, name, ours, before))

    def _watch_backward(self) -> None:
        """Mark one gradient per group after each backward, to notice changes before the step."""
        window = self._window
        for optimizer in window.optimizers:
            for group in optimizer.param_groups:
                first = next((p for p in group["params"] if p.requires_grad), None)
                if first is not None:
                    self._handles.append(first.register_post_accumulate_grad_hook(self._note))

    def _note(self, param: Tensor) -> None:
        if (mark := mark_of(param)) is not None:
            self._marks[id(param)] = mark

    def _check_unchanged(self) -> None:
        """Raise if gradients were clipped, cleared or unscaled between backward and step."""
        window = self._window
        marks, self._marks = self._marks, {}
        if window.ranks.world > 1 and window.micro_step == window.steps - 1 and not window.sums:
            return  # DistributedDataParallel has written the mean over the ranks
        if any(mark.change() for mark in marks.values()):
            raise RuntimeError(
                "gradients were changed or cleared between backward and step, where they are "
                "part of a sum: clip with max_grad_norm= of the optimizer instead of in the "
                "loop, pass the GradScaler to install(scaler=...), or use `with accum:`"
            )

    def _end_micro_step(self, optimizer: Optimizer) -> bool:
        """End the micro-step unless it has ended; whether it completed a window."""
        window = self._window
        window.check_whole()
        if self._ended and id(optimizer) not in self._stepped:
            return window.ready
        window.broken = True  # unless all goes well
        self._ended = True
        self._stepped.clear()
        if self._hidden:
            raise RuntimeError("scaler.unscale_() was called without scaler.step() after it")
        if self._uncleared:
            raise RuntimeError(
                "a new accumulation window has begun, but optimizer.zero_grad() was not called "
                "after the step of the last one"
            )
        window.check_model()
        self._check_unchanged()
        if window.ready:
            window.close()
        window.end_micro_step()
        if window.ready:
            self._uncleared = set(map(id, window.optimizers))
        elif window.sums is not None:
            window.sums.release_grads()
        window.quiet_ranks()
        window.broken = False
        return window.ready

    def _has_stepped(self, optimizer: Optimizer) -> None:
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._window.optimizers):
            self._ended = False
            self._stepped.clear()

    def _step(self, inner: _Method, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if "found_inf" in vars(optimizer):
            raise RuntimeError(
                "a GradScaler steps this optimizer that accumulate() does not know: pass it to "
                "install(scaler=...)"
            )
        closure = kwargs.pop("closure", args[0] if args else None)
        loss = None if closure is None else loss_of(closure)
        if self._end_micro_step(optimizer):
            result = self._pass(inner, *args[1:], **kwargs)
            loss = result if closure is None else loss
        self._has_stepped(optimizer)
        return loss

    def _scaler_step(
        self, inner: _Method, _: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        if optimizer not in self._window.optimizers:
            return inner(optimizer, *args, **kwargs)
        for param, grad in self._hidden.pop(id(optimizer), ()):
            param.grad = grad
        result = None
        if self._end_micro_step(optimizer):
            result = self._pass(inner, optimizer, *args, **kwargs)
        self._has_stepped(optimizer)
        return result

    def _unscale(self, inner: _Method, scaler: Any, optimizer: Optimizer) -> Any:
        if optimizer not in self._window.optimizers:
            return inner(optimizer)
        self._unscales = True
        if self._end_micro_step(optimizer):
            if not getattr(scaler, "divides_in_unscale", False):
                division.divide(optimizer)
            return self._pass(inner, optimizer)
        # Clipping comes between this and scaler.step. Inside a window it must find no gradients.
        hidden = [(p, p.grad) for p in params_of(optimizer) if p.grad is not None]
        self._hidden[id(optimizer)] = hidden
        for param, _ in hidden:
            param.grad = None
        return None

    def _zero_grad(self, inner: _Method, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._uncleared.discard(id(optimizer))
        window = self._window
        if window.micro_step and not window.ready:
            return None
        params = params_of(optimizer)
        if window.sums is not None:
            window.sums.clear(params)
        for param in params:
            self._marks.pop(id(param), None)
        return inner(*args, **kwargs)

    def _when_ready(self, inner: _Method, _: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) if self._window.ready else None

    def _pass(self, call: _Method, *args: Any, **kwargs: Any) -> Any:
        self._passing = True
        try:
            return call(*args, **kwargs)
        finally:
            self._passing = False

    def take_steps(self) -> None:
        """Step, update and clear as the loop does, for a window that flush() has completed."""
        self._pass(self._take_steps)
        self._window.close()
        self.restart()

    def check_visible(self) -> None:
        """Raise while gradients are hidden from clipping."""
        if self._hidden:
            raise RuntimeError(
                "state_dict() between scaler.unscale_() and scaler.step(), where the gradients of "
                "an open window are hidden: save before the one or after the other"
            )

    def check_flush(self) -> None:
        """Close a window that was complete before."""
        window = self._window
        if self._unscales:
            raise RuntimeError(
                "the loop calls scaler.unscale_() before the step, most likely to clip, which "
                "flush() would leave out: clip with max_grad_norm= of the optimizer, or write "
                "the loop with `with accum:`"
            )
        if window.ready:
            if self._uncleared:
                raise RuntimeError("flush() before optimizer.zero_grad() of the last window")
            window.close()

    def restart(self) -> None:
        """Begin with a new micro-step."""
        self._ended = False
        for some in (self._stepped, self._uncleared, self._hidden, self._marks):
            some.clear()
        self._window.quiet_ranks()

    def _take_steps(self) -> None:
        for optimizer in self._window.optimizers:
            if self._scaler is not None:
                self._scaler.step(optimizer)
            else:
                optimizer.step()
        if self._scaler is not None:
            self._scaler.update()
        for scheduler in self._schedulers:
            scheduler.step()
        for optimizer in self._window.optimizers:
            optimizer.zero_grad()

    def remove(self) -> None:
        """Put the originals back. A method that was wrapped by others since calls its original."""
        self._active = False
        for owner, name, ours, before in self._replaced:
            if vars(owner).get(name) is not ours:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        for handle in self._handles:
            handle.remove()
        self._replaced.clear()
        self._handles.clear()
        self._marks.clear()
