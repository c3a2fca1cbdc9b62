"""fp32 sums of the gradients of bfloat16 and float16 parameters, made during backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..grads.add import Addition, add_alike, add_all
from ..grads.dtensors import align_all
from ..grads.hooks import Hooked, weakly

LOW_PRECISION = (torch.bfloat16, torch.float16)


class _Sum:
    """The sum of one parameter, in a buffer.

    After an addition the buffer is `.grad`, until the next micro-step begins. In pairs it is
    `.grad` only at the window's end.
    """

    def __init__(self, param: Tensor, name: str) -> None:
        self.name = name
        self.grad_dtype = param.grad_dtype
        self.buffer: Tensor | None = None
        self.generation = 0  # the number of the window whose sum is in the buffer
        self.hidden = False  # a sum is in the buffer, but was taken out of `.grad` here
        self.waiting: Tensor | None = None  # the first gradient of a pair
        self.waiting_version = 0


class Sums:
    """The buffers, and the hooks that fill them.

    The hook of a parameter adds its gradient to an fp32 buffer, frees the gradient and puts the
    buffer into `.grad`. Before the next micro-step the buffer is taken out of `.grad`, so that
    autograd hands over the next gradient without adding it. Where the buffer stays in `.grad`, or a
    backward reaches a parameter twice (reentrant checkpointing), autograd adds into the buffer.

    In pairs, the hook keeps every other gradient of a parameter. The next one is added together
    with it, in one pass. `.grad` is None until the last micro-step of the window.
    """

    def __init__(self, in_pairs: bool = False) -> None:
        self._sums: Hooked[_Sum] = Hooked()
        self._hook = weakly(self._arrived)
        self._generation = 1
        self._in_pairs = in_pairs
        self._pairs_up = False  # gradients wait, before the last micro-step of a window
        self._came = False  # a gradient came since `mark`

    def __bool__(self) -> bool:
        return len(self._sums) > 0

    def __contains__(self, param: Tensor) -> bool:
        return param in self._sums

    def attach(self, params: Iterable[tuple[str, Tensor]]) -> None:
        """Hook the low-precision parameters among (name, parameter) that have no hook yet."""
        for name, param in params:
            if param.requires_grad and param.dtype in LOW_PRECISION and param not in self:
                self._begin(name, param)

    def _begin(self, name: str, param: Tensor) -> None:
        mine = _Sum(param, name)
        param.grad_dtype = None  # lets .grad be fp32
        self._sums.add(param, mine, self._hook)
        if param.grad is not None:
            self._add(mine, param)

    def _arrived(self, param: Tensor) -> None:
        """A gradient is in `.grad`."""
        if (mine := self._sums.of(param)) is not None:
            self._add(mine, param, self._pairs_up)

    def _add(self, mine: _Sum, param: Tensor, waits: bool = False) -> None:
        """Let `.grad` wait, or add it to the buffer and put the buffer into `.grad`."""
        if (addition := self._taken(mine, param, waits)) is not None:
            add_alike([addition])
            self._added(mine)
            self._show(mine, param, not waits)

    def _taken(self, mine: _Sum, param: Tensor, waits: bool) -> Addition | None:
        """Keep the gradient for the next one, or return the addition to run; None if there is none.

        Args:
            waits: let the gradient wait, if none does already.
        """
        align_all([param])
        grad = param.grad
        if grad is not None and grad is mine.buffer:
            mine.generation = self._generation
            grad = None
        elif grad is not None:
            if not mine.hidden:  # the script has cleared `.grad`, or this is the first gradient
                mine.generation = 0
            self._check(mine, grad)
            self._came = True
            if waits and mine.waiting is None:
                mine.waiting, mine.waiting_version = grad, grad._version
                self._show(mine, param, False)
                return None
        return None if waits and grad is None else self._addition(mine, grad)

    def _show(self, mine: _Sum, param: Tensor, shown: bool = True) -> None:
        """Put the buffer into `.grad`, or None."""
        mine.hidden = not shown
        param.grad = mine.buffer if shown else None

    def _check(self, mine: _Sum, grad: Tensor) -> None:
        """Raise if this gradient cannot be added to what there is."""
        if grad.requires_grad:
            raise RuntimeError(
                f"accumulate(dtype=torch.float32): the gradient of {mine.name} has a graph of its "
                "own (create_graph=True), which sums in another dtype do not keep"
            )
        if grad.layout is not torch.strided:
            raise TypeError(
                f"accumulate(dtype=torch.float32): the gradient of {mine.name} is sparse; use "
                "sparse=False, or leave dtype=None"
            )
        before = mine.buffer if mine.generation == self._generation else mine.waiting
        if before is not None and not _fits(before, grad):
            raise RuntimeError(
                f"the shape or device of {mine.name} changed inside an accumulation window"
            )

    def _addition(self, mine: _Sum, grad: Tensor | None) -> Addition | None:
        """The addition of the waiting gradient and `grad`; None if there is neither."""
        term, more = (grad, None) if mine.waiting is None else (mine.waiting, grad)
        if term is None:
            return None
        if mine.waiting is not None and mine.waiting._version != mine.waiting_version:
            raise RuntimeError(
                f"accumulate(in_pairs=True): the gradient of {mine.name} was changed in place "
                "after the backward that made it, while it waited for the next one"
            )
        start = mine.generation != self._generation
        if mine.buffer is None or (start and not _fits(mine.buffer, term)):
            mine.buffer = torch.empty_like(
                term, dtype=torch.float32, memory_format=torch.preserve_format
            )
        return Addition(mine.buffer, term, more, 1.0, start)

    def _added(self, mine: _Sum) -> None:
        """After an addition: the sum is in the buffer, and the waiting gradient is freed."""
        mine.generation = self._generation
        mine.waiting = None

    def expect(self, last: bool) -> None:
        """Say whether the next micro-step is the last of a window."""
        self._pairs_up = self._in_pairs and not last

    def collect(self, last: bool) -> None:
        """After a micro-step, take in gradients that no hook has seen, and fill `.grad`.

        Parameters without a gradient in this micro-step get their buffer back into `.grad`. In
        pairs this waits for the last micro-step, and gradients may wait until then.
        """
        waits = self._in_pairs and not last
        found = []
        for param, mine in self._sums:
            if (addition := self._taken(mine, param, waits)) is not None:
                found.append((mine, param, addition))
            elif not waits and param.grad is None and mine.generation == self._generation:
                self._show(mine, param)
        add_all([addition for _, _, addition in found])
        for mine, param, _ in found:
            self._added(mine)
            self._show(mine, param, not waits)

    def add_waiting(self) -> None:
        """Add the gradients that wait."""
        found = []
        for _, mine in self._sums:
            if (addition := self._addition(mine, None)) is not None:
                found.append((mine, addition))
        add_all([addition for _, addition in found])
        for mine, _ in found:
            self._added(mine)

    def mark(self) -> None:
        """From here on, `came_since_mark` counts."""
        self._came = False

    def came_since_mark(self) -> bool:
        """In pairs: True if a gradient was taken in since `mark`; `.grad` does not show that."""
        return self._in_pairs and self._came

    def release_grads(self) -> None:
        """Take the buffers out of `.grad` for the next micro-step of the window."""
        for param, mine in self._sums:
            if self._in_pairs and param.grad is None:
                continue
            if self._in_pairs or mine.generation == self._generation:
                if param.grad is not mine.buffer:
                    raise RuntimeError(
                        f"the gradient of {mine.name} was set, replaced or cleared inside an "
                        "accumulation window (zero_grad between micro-steps?)"
                    )
                self._show(mine, param, False)

    def begin_window(self) -> None:
        """Forget the sums. A gradient that is left in `.grad` is the first term, as in torch."""
        self._generation += 1
        for param, mine in self._sums:
            if param.grad is None:
                continue
            if param.grad is mine.buffer:
                mine.generation = self._generation
            else:
                self._add(mine, param)

    def end_window(self) -> None:
        """The sums are whole: the next gradient starts a new one."""
        self._generation += 1
        self._pairs_up = False

    def put(self, param: Tensor, value: Tensor) -> bool:
        """Make `value` the sum of a parameter; False if it has no buffer here."""
        mine = self._sums.of(param)
        if mine is None:
            return False
        mine.buffer = value.to(device=param.device, dtype=torch.float32, copy=True)
        self._added(mine)
        self._show(mine, param)
        return True

    def hidden(self, param: Tensor) -> Tensor | None:
        """The sum so far of the open window, where it is not in `.grad`."""
        mine = self._sums.of(param)
        live = mine is not None and mine.generation == self._generation and param.grad is None
        return mine.buffer if mine is not None and live else None

    def clear(self, params: Iterable[Tensor]) -> None:
        """The script clears these gradients: drop their sums and the gradients that wait."""
        for param in params:
            mine = self._sums.of(param)
            if mine is not None:
                mine.generation, mine.waiting = 0, None

    def forget(self) -> None:
        """Drop the sums of the open window."""
        self._generation += 1
        self._pairs_up = False
        for param, mine in self._sums:
            mine.waiting = None
            if param.grad is mine.buffer:
                param.grad = None

    def round(self, params: Iterable[Tensor], factor: float) -> None:
        """Replace the sums by their product with factor in the parameter's own dtype."""
        for param in params:
            mine = self._sums.of(param)
            if mine is None or mine.buffer is None or param.grad is not mine.buffer:
                continue
            low = torch.empty_like(mine.buffer, dtype=param.dtype)
            add_alike([Addition(low, mine.buffer, None, factor, True)])
            param.grad = low

    def remove(self) -> None:
        """Remove the hooks. `.grad` gets the sum so far, rounded to the parameter's dtype."""
        found = list(self._sums)
        for param, mine in found:
            if self._pairs_up and param.grad is None:
                live = mine.generation == self._generation
                if live and mine.buffer is not None and mine.waiting is not None:
                    add_alike([Addition(mine.buffer, mine.waiting, None, 1.0, False)])
                param.grad = mine.buffer if live else mine.waiting
        self.round([param for param, _ in found], 1.0)
        self._sums.remove()
        for param, mine in found:
            param.grad_dtype = mine.grad_dtype


def _fits(buffer: Tensor, grad: Tensor) -> bool:
    return buffer.shape == grad.shape and buffer.device == grad.device
