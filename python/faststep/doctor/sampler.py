"""Watches a thread that trains, without a change of what it does.

Another thread looks at its stack every few milliseconds. Hooks of torch note each step of an
optimizer and each loss.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._torch.compiler import disable_dynamo
from .phases import Place, look

INTERVAL = 0.05  # seconds between two looks where training goes on


class Sampler:
    """Watches the thread that makes it.

    A step ends when an optimizer has stepped, or after a backward pass where there is none.

    Args:
        interval: seconds between two looks at the stack.
        looked: called in the other thread after each look, with the time and what `look` returns.
        stepped: called when a step ends, with its optimizer, or None, and the list of `ends`.
            Default: nothing is called.
        lost: called before each backward pass from a tensor of one element, with this tensor.
            Default: nothing is called.

    Attributes:
        ends: when steps ended, by the `id` of the optimizer, or 0 for backward passes.
    """

    def __init__(
        self,
        interval: float,
        looked: Callable[[float, str, Place | None, Place | None], object],
        stepped: Callable[[Optimizer | None, list[float]], object] = lambda *_: None,
        lost: Callable[[torch.Tensor], object] = lambda _: None,
    ) -> None:
        self.ends: dict[int, list[float]] = defaultdict(list)
        self._interval = interval
        self._looked, self._stepped, self._lost = looked, stepped, lost
        self._watched, self._process = threading.get_ident(), os.getpid()
        self._is_on = False
        self._has_optimizer = False
        self._thread = threading.Thread(target=self._look_on, name="faststep sampler", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._is_on = True
        hook = disable_dynamo(lambda *given: self.note_step(*given))  # takes no method
        self._hook = register_optimizer_step_post_hook(hook)
        self._backward = torch.autograd.backward
        self._noting = disable_dynamo(self._noted(self._backward))
        torch.autograd.backward = self._noting
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; a caller other than the sampler's own thread waits for the last look."""
        self._is_on = False
        self._hook.remove()
        if torch.autograd.backward is self._noting:  # else somebody has wrapped it, too
            torch.autograd.backward = self._backward
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _noted(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def noted(tensors: Any, *args: Any, **kwargs: Any) -> None:
            is_elsewhere = self._is_elsewhere()
            if not is_elsewhere:
                root = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
                if root is not None and root.numel() == 1:
                    self._lost(root)
            backward(tensors, *args, **kwargs)
            if not (is_elsewhere or self._has_optimizer):  # a script that updates by hand
                self._end_step(None, self.ends[0])

        return noted

    def note_step(self, optimizer: Optimizer, *_: object) -> None:
        """Note that an optimizer has stepped, or would have."""
        if not self._is_elsewhere():
            self._has_optimizer = True
            self._end_step(optimizer, self.ends[id(optimizer)])

    def _end_step(self, optimizer: Optimizer | None, ends: list[float]) -> None:
        ends.append(time.perf_counter())
        self._stepped(optimizer, ends)

    def _is_elsewhere(self) -> bool:
        """True where nothing is to be noted, as in forks of the script."""
        here = threading.get_ident(), os.getpid()
        return not self._is_on or here != (self._watched, self._process)

    def _look_on(self) -> None:
        while self._is_on:
            time.sleep(self._interval)
            found = look(self._watched)
            self._looked(time.perf_counter(), *found)
