"""A parameter, as the engine knows it."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..._torch.optim import increment_version
from .placeholder import Placeholder


class Part(NamedTuple):
    """The part of a parameter that this rank owns."""

    values: Tensor  # flat; a part of the bucket
    grad: Tensor  # their gradient, a part of the slice
    begin: int  # in elements of the parameter


@dataclass(eq=False)
class Slot:
    """A parameter that is sharded."""

    index: int  # among all that are sharded, in the order of buckets
    name: str  # in the model
    param: Tensor
    bucket: int  # the number of its bucket
    place: int  # its number in the bucket
    part: Part | None = None  # what this rank owns of it, if anything
    arrived: bool = False  # in this backward pass, on this rank
    held: bool = False  # slices have a gradient that some rank has given since the last zero_grad()
    whole: Tensor | None = None  # the gradient in place of slices, once a script had a view of it

    def __post_init__(self) -> None:
        # Of its gradient in the bucket, too. If the script changes those, a step puts them back.
        self.shape, self.strides = self.param.size(), self.param.stride()

    def stand_for(self, made: Placeholder) -> None:
        """Let this be in its `.grad` while the slices hold its gradient."""
        self.stand_in = made
        del made
        self._uses = sys.getrefcount(self.stand_in)

    def drop(self) -> None:
        """Note that the script has dropped its gradient, which it may have kept elsewhere."""
        is_gone = not self.stand_in.is_same(self.param.grad)
        if is_gone and sys.getrefcount(self.stand_in) > self._uses:
            kept = copy.copy(self)
            kept.whole, kept.held = self.own, True
            if self.part is not None:
                grad = self.part.grad.clone()
                kept.part = Part(grad, grad, self.part.begin)
            del kept.param, kept.stand_in  # these would be circles
            self.stand_for(self.stand_in.successor(kept))
        self.held = self.arrived = False
        self.whole = None

    @property
    def own(self) -> Tensor | None:
        """The gradient, where this rank has it without slices."""
        return self.whole if self.held or self.whole is not None else self.stand_in.pending

    @property
    def is_present(self) -> bool:
        """True if the next step updates it."""
        return self.held and self.stand_in.is_same(self.param.grad)

    def begin_pass(self) -> None:
        """Before backward: note that its gradient has not arrived."""
        self.arrived = False
        if not self.stand_in.is_same(self.param.grad):  # the script has dropped what was there
            if self.held:
                self.forget()
            elif self.stand_in.pending is not None:
                self.drop()
            self.stand_in.pending = None

    def taken(self) -> Tensor | None:
        """A gradient that backward has put into `.grad`, where a placeholder takes its place."""
        grad = self.param.grad
        if isinstance(grad, Placeholder) and self.stand_in.is_same(grad):
            held, grad = grad, grad.pending
            held.pending = None
        if grad is None:
            return None
        if grad.is_sparse:
            raise TypeError(
                f"faststep.zero does not support sparse gradients, which {self.name!r} has: use "
                "torch.nn.Embedding(sparse=False)"
            )
        if self.param.dtype != self.stand_in.dtype:
            raise TypeError(
                f"faststep.zero: parameter {self.name!r} is {self.param.dtype}, and was "
                f"{self.stand_in.dtype} when it was sharded: call model.to(dtype) before shard()"
            )
        self.param.grad = self.stand_in
        return grad.detach()

    def take_over(self, grad: Tensor) -> None:
        """Let the slices have a gradient that is the same on all ranks."""
        self.drop()
        if self.part is not None:
            self._write(self.cut(grad))
        self.held, self.param.grad = True, self.stand_in

    def take_back(self) -> None:
        """Let the slices have what was written to the whole gradient."""
        if self.whole is not None and self.part is not None:
            mine, now = self.part.grad, self.cut(self.whole)
            self._write(torch.where(now == mine.to(now.dtype), mine, now))  # fp32 ones have more
        self.whole = None

    def cut(self, other: Tensor) -> Tensor:
        """This rank's part of a tensor that broadcasts to the parameter, in the order of memory."""
        if not other.dim() and self.shape:  # a number for all elements
            return other
        assert self.part is not None
        whole = other.expand(self.shape)
        if whole.stride() != self.strides:
            whole = torch.empty_strided(
                self.shape, self.strides, dtype=other.dtype, device=other.device
            ).copy_(whole)
        flat = whole.as_strided((whole.numel(),), (1,))
        return flat[self.part.begin :][: self.part.grad.numel()]

    def forget(self) -> None:
        """Drop its gradient, on this rank."""
        self.drop()
        self.make_zero()

    def make_zero(self) -> None:
        """Set its gradient to zero, on this rank."""
        self.whole = None
        if self.part is not None:
            self.part.grad.zero_()
            increment_version([self.part.grad])

    def _write(self, values: Tensor) -> None:
        """Give this rank's part of the gradient other values."""
        assert self.part is not None
        self.part.grad.copy_(values)
        increment_version([self.part.grad])  # copy_() does not, inside of another operator
