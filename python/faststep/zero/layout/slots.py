"""What the engine knows of one parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from .placeholder import Placeholder

__all__ = ["Slot", "in_order_of_memory"]


class Slot:
    """A parameter that is sharded.

    Attributes:
        index: among all that are sharded, in the order of buckets.
        name: in the model.
        param: the model's parameter.
        bucket: the number of its bucket.
        place: its number in the bucket.
        shape: of the parameter, and of its gradient in the bucket.
        strides: the same. The script may give the parameter others; a step puts them back.
        stand_in: what stands in its `.grad` while the slices hold its gradient.
        pieces: what this rank owns of it: flat tensors, and their gradients in the slice.
        begins: of each piece, in elements of the parameter.
        arrived: in this backward pass, on this rank.
        held: the slices hold a gradient that some rank has given since the last zero_grad().
        whole: the gradient in the place of the slices, after a script has taken a view of it.
    """

    __slots__ = (
        *(
            "arrived",
            "begins",
            "bucket",
            "held",
            "index",
            "name",
            "param",
            "pieces",
            "place",
            "shape",
            "strides",
        ),
        *("stand_in", "whole"),
    )

    def __init__(self, index: int, name: str, param: Tensor, bucket: int, place: int) -> None:
        self.index = index
        self.name = name
        self.param = param
        self.bucket = bucket
        self.place = place
        self.shape = param.size()
        self.strides = param.stride()
        self.stand_in: Placeholder
        self.pieces: list[tuple[Tensor, Tensor]] = []
        self.begins: list[int] = []
        self.arrived = False
        self.held = False
        self.whole: Tensor | None = None

    @property
    def is_present(self) -> bool:
        """Whether the next step updates it."""
        return self.held and self.stand_in.is_same(self.param.grad)

    def begin_pass(self) -> None:
        """Before backward: note that its gradient has not arrived."""
        self.arrived = False
        if not self.stand_in.is_same(self.param.grad):  # the script has dropped what was there
            self.stand_in.pending = None
            if self.held:
                self.forget()

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
        for (_, mine), begin in zip(self.pieces, self.begins, strict=True):
            mine.copy_(self.cut(grad, begin, mine.numel()))
        self.whole = None
        self.held, self.param.grad = True, self.stand_in

    def take_back(self) -> None:
        """Let the slices have what was written to the whole gradient."""
        if self.whole is None:
            return
        for (_, mine), begin in zip(self.pieces, self.begins, strict=True):
            now = self.cut(self.whole, begin, mine.numel())
            mine.copy_(torch.where(now == mine.to(now.dtype), mine, now))  # fp32 ones may have more
        self.whole = None

    def cut(self, other: Tensor, begin: int, count: int) -> Tensor:
        """Some elements of a tensor that broadcasts to the parameter, in the order of memory."""
        if not other.dim() and self.shape:  # a number for all elements
            return other
        like = torch.empty_strided(self.shape, self.strides, device="meta")
        return in_order_of_memory(other.expand(self.shape), like)[begin : begin + count]

    def forget(self) -> None:
        """Drop its gradient, on this rank."""
        self.held = False
        self.make_zero()

    def make_zero(self) -> None:
        """Set its gradient to zero, on this rank."""
        self.whole = None
        for _, grad in self.pieces:
            grad.zero_()


def in_order_of_memory(value: Tensor, param: Tensor) -> Tensor:
    """The elements of a tensor of the parameter's shape, in the order of the parameter's memory."""
    if value.stride() == param.stride():
        return value.as_strided((value.numel(),), (1,))
    dense = torch.empty_like(param, dtype=value.dtype, device=value.device)
    dense.copy_(value)
    return dense.as_strided((dense.numel(),), (1,))
