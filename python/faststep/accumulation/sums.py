"""fp32 sums of the gradients of bfloat16 and float16 parameters, made during backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._torch import disable_dynamo, get_grad_dtype, increment_version, set_grad_dtype
from ..optim._devices import has_kernels_for

__all__ = ["LOW_PRECISION", "Sums"]

LOW_PRECISION = (torch.bfloat16, torch.float16)


class _Sum:
    """What is known of one parameter; `.grad` is the buffer once a gradient was added to it."""

    def __init__(self, param: Tensor, name: str) -> None:
        self.param = weakref.ref(param)
        self.name = name
        self.grad_dtype = get_grad_dtype(param)
        self.buffer: Tensor | None = None
        self.generation = 0  # of the window whose sum the buffer holds
        self.handle: Any = None


class Sums:
    """The buffers, and the hooks that fill them.

    After each gradient's hook `.grad` is the fp32 buffer. The low-precision gradient is freed at
    once. At the start of a micro-step `.grad` is taken away, so that autograd hands over the next
    gradient as it is, without a pass; where it is left, or a parameter is reached twice in a
    backward (reentrant checkpointing), autograd adds into the buffer by itself.
    """

    def __init__(self) -> None:
        self._sums: dict[int, _Sum] = {}
        self._generation = 1

    def __bool__(self) -> bool:
        return bool(self._sums)

    def __contains__(self, param: Tensor) -> bool:
        return self._of(param) is not None

    def attach(self, params: Iterable[tuple[str, Tensor]]) -> bool:
        """Hook the low-precision parameters among (name, parameter) that have no hook yet.

        Returns whether there were any.
        """
        before = len(self._sums)
        for name, param in params:
            if param.requires_grad and param.dtype in LOW_PRECISION and not self._of(param):
                self._hook(name, param)
        return len(self._sums) > before

    def _of(self, param: Tensor) -> _Sum | None:
        mine = self._sums.get(id(param))
        return mine if mine is not None and mine.param() is param else None

    def _hook(self, name: str, param: Tensor) -> None:
        mine = _Sum(param, name)
        set_grad_dtype(param, None)  # lets .grad be fp32
        owner = weakref.ref(self)

        @disable_dynamo
        def add(param: Tensor) -> None:
            sums = owner()
            if sums is not None:
                sums._add(mine, param)

        mine.handle = param.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        self._sums[id(param)] = mine
        if param.grad is not None:
            self._add(mine, param)

    def _add(self, mine: _Sum, param: Tensor) -> None:
        """Add `.grad` to the buffer and put the buffer in its place."""
        if (addition := self._addition(mine, param)) is not None:
            add_to(*addition)
            self._show(mine, param)

    def _addition(self, mine: _Sum, param: Tensor) -> _Addition | None:
        """What `.grad` is to be added to; None if there is nothing to add."""
        grad = param.grad
        if grad is None:
            return None
        if grad is mine.buffer:
            mine.generation = self._generation
            return None
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
        start = mine.generation != self._generation
        if mine.buffer is None or not _fits(mine.buffer, grad):
            if not start:
                raise RuntimeError(
                    f"the shape or device of {mine.name} changed inside an accumulation window"
                )
            mine.buffer = torch.empty_like(
                grad, dtype=torch.float32, memory_format=torch.preserve_format
            )
        return _Addition(mine.buffer, grad, 1.0, start)

    def _show(self, mine: _Sum, param: Tensor) -> None:
        """The buffer holds the sum: free the gradient."""
        mine.generation = self._generation
        param.grad = mine.buffer

    def collect(self) -> None:
        """After a micro-step: take in what came without a hook, show the sums that got no term."""
        found = []
        for mine, param in self._pairs():
            if param.grad is None and mine.generation == self._generation:
                param.grad = mine.buffer
            elif (addition := self._addition(mine, param)) is not None:
                found.append((mine, param, addition))
        add_all([addition for _, _, addition in found])
        for mine, param, _ in found:
            self._show(mine, param)

    def release_grads(self) -> None:
        """Take the buffers out of `.grad` for the next micro-step of the window."""
        for mine, param in self._pairs():
            if mine.generation == self._generation:
                if param.grad is not mine.buffer:
                    raise RuntimeError(
                        f"the gradient of {mine.name} was replaced or cleared inside an "
                        "accumulation window (zero_grad between micro-steps?)"
                    )
                param.grad = None

    def begin_window(self) -> None:
        """Forget the sums; what is left in `.grad` counts as the first term, as in torch."""
        self._generation += 1
        for mine, param in self._pairs():
            if param.grad is None:
                continue
            if param.grad is mine.buffer:
                mine.generation = self._generation
            else:
                self._add(mine, param)

    def end_window(self) -> None:
        """The sums are whole: the next gradient starts a new one."""
        self._generation += 1

    def put(self, param: Tensor, value: Tensor) -> bool:
        """Make `value` the sum of a parameter; False if it has no buffer here."""
        mine = self._of(param)
        if mine is None:
            return False
        mine.buffer = value.to(device=param.device, dtype=torch.float32, copy=True)
        mine.generation = self._generation
        param.grad = mine.buffer
        return True

    def hidden(self, param: Tensor) -> Tensor | None:
        """The sum so far of the open window, where it is not in `.grad`."""
        mine = self._of(param)
        live = mine is not None and mine.generation == self._generation and param.grad is None
        return mine.buffer if mine is not None and live else None

    def forget(self) -> None:
        """Drop the sums of the open window."""
        self._generation += 1
        for mine, param in self._pairs():
            if param.grad is mine.buffer:
                param.grad = None

    def round(self, params: Iterable[Tensor], factor: float) -> None:
        """Replace the sums by their product with factor in the parameter's own dtype."""
        for param in params:
            mine = self._of(param)
            if mine is None or mine.buffer is None or param.grad is not mine.buffer:
                continue
            low = torch.empty_like(mine.buffer, dtype=param.dtype)
            add_to(low, mine.buffer, factor, True)
            param.grad = low

    def remove(self) -> None:
        """Undo everything; sums that are in `.grad` are rounded to the parameter's dtype."""
        pairs = list(self._pairs())
        self.round([param for _, param in pairs], 1.0)
        for mine in self._sums.values():
            mine.handle.remove()
        for mine, param in pairs:
            set_grad_dtype(param, mine.grad_dtype)
        self._sums.clear()

    def _pairs(self) -> Iterable[tuple[_Sum, Tensor]]:
        for mine in self._sums.values():
            param = mine.param()
            if param is not None:
                yield mine, param


def _fits(buffer: Tensor, grad: Tensor) -> bool:
    return buffer.shape == grad.shape and buffer.device == grad.device


class _Addition(NamedTuple):
    """total += factor * term, or = with `start`; any two dtypes."""

    total: Tensor
    term: Tensor
    factor: float
    start: bool


def add_to(total: Tensor, term: Tensor, factor: float, start: bool) -> None:
    """One addition, in one kernel."""
    _add_alike([_Addition(total, term, factor, start)])


def add_all(additions: Iterable[_Addition]) -> None:
    """Many additions: one kernel for those alike."""
    alike: dict[tuple[Any, ...], list[_Addition]] = {}
    for one in additions:
        alike.setdefault((one.total.device, one.factor, one.start), []).append(one)
    for these in alike.values():
        _add_alike(these)


def _add_alike(additions: list[_Addition]) -> None:
    """One kernel for additions of one device, factor and `start`."""
    totals, terms = [one.total for one in additions], [one.term for one in additions]
    on_device = totals[0].is_cuda and has_kernels_for(totals[0])
    add = _C.device_accumulate if on_device else _C.accumulate
    try:
        add(totals, terms, additions[0].factor, additions[0].start)
    except TypeError:  # on a device without our kernels, or a layout that they do not know
        _add_by_torch(additions)
    else:
        increment_version(totals)


def _add_by_torch(additions: Iterable[_Addition]) -> None:
    with torch.no_grad():
        for total, term, factor, start in additions:
            if start:
                total.copy_(term).mul_(factor)
            else:
                total.add_(term, alpha=factor)
