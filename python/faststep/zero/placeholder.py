"""What stands in `.grad` of a parameter whose gradient was reduced into the slices of the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .._torch.ddp import current_backward
from .._torch.tensors import new_wrapper

__all__ = ["Holder", "Placeholder"]

_aten = torch.ops.aten
_REFUSED = object()


class Holder(Protocol):
    """What a placeholder asks of the object that has the slices."""

    def name_of(self, index: int) -> str:
        """The name of a parameter."""

    def make_zero(self, index: int) -> None:
        """Set the gradient of a parameter to zero."""

    def scale(self, index: int, factor: float) -> None:
        """Multiply the gradient of a parameter."""

    def unscale(self, dtype: torch.dtype, inv_scale: Tensor, found_inf: Tensor) -> None:
        """Multiply all gradients of a dtype, and look for infinities on all ranks."""


class Placeholder(Tensor):
    """A tensor of a parameter's shape and dtype without memory.

    Backward adds to it what the next micro-step gives. Scalers and zero_grad() reach the slices
    through it. Whatever else would read or write a gradient raises an error.
    """

    pending: Tensor | None
    _refer: Callable[[], Holder | None]  # weakly: torch cannot collect a circle through `.grad`
    _index: int

    @property
    def _holder(self) -> Holder:
        holder = self._refer()
        if holder is None:
            raise RuntimeError(
                "faststep.zero: the optimizer that had this gradient is gone; set .grad to None"
            )
        return holder

    @staticmethod
    def __new__(cls, param: Tensor, holder: Holder | None, index: int) -> Placeholder:
        """Of the parameter with this number; of nobody if the optimizer is gone."""
        made = new_wrapper(
            cls, param.size(), device=str(param.device), dtype=param.dtype, strides=param.stride()
        )
        assert isinstance(made, Placeholder)
        made.pending = None
        made._refer = weakref.ref(holder) if holder is not None else lambda: None
        made._index = index
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        holder = self._refer()
        if holder is None:
            return "Placeholder(gradient of faststep.zero, whose optimizer is gone)"
        name = holder.name_of(self._index)
        return f"Placeholder(gradient of {name!r}, which faststep.zero has spread over the ranks)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None and (given := answer(*args, **(kwargs or {}))) is not _REFUSED:
            return given
        raise RuntimeError(_refusal(str(func), (*args, *(kwargs or {}).values())))


def _refusal(operation: str, args: tuple[Any, ...]) -> str:
    tensors = [t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    one = next(tensor for tensor in tensors if isinstance(tensor, Placeholder))
    name = one._holder.name_of(one._index)
    return (
        f"{operation} on the gradient of {name!r}: faststep.zero has reduced it into slices on "
        "the ranks, and .grad has no values. Clip with max_grad_norm=, with "
        "optimizer.clip_grad_norm_(max_norm) or with scaler.step(optimizer, max_norm=...), where "
        "optimizer is what shard() returned, and step that optimizer only; "
        "put DistributedDataParallel around the model before shard()"
    )


def _detach(held: Tensor) -> object:
    if not isinstance(held, Placeholder):
        return _REFUSED
    return Placeholder(held, held._refer(), held._index)


def _add(held: Tensor, more: Tensor, *, alpha: float = 1) -> object:
    """Keep what backward adds, for the hook that follows."""
    if not isinstance(held, Placeholder) or current_backward() < 0 or alpha != 1:
        return _REFUSED
    held.pending = more if held.pending is None else held.pending + more
    return held


def _zero(held: Tensor) -> object:
    if not isinstance(held, Placeholder):
        return _REFUSED
    held.pending = None
    held._holder.make_zero(held._index)
    return held


def _multiply(held: Tensor, factor: object) -> object:
    """By a number; ranks are expected to do the same."""
    if isinstance(factor, Tensor) and factor.dim() == 0 and type(factor) is Tensor:
        factor = factor.item()
    if not isinstance(held, Placeholder) or not isinstance(factor, (int, float)):
        return _REFUSED
    held._holder.scale(held._index, float(factor))
    return held


def _divide(held: Tensor, divisor: object) -> object:
    if isinstance(divisor, Tensor) and divisor.dim() == 0 and type(divisor) is Tensor:
        divisor = divisor.item()
    if not isinstance(divisor, (int, float)) or not divisor:
        return _REFUSED
    return _multiply(held, 1.0 / divisor)


def _zero_all(held: list[Tensor]) -> None:
    for one in held:
        if _zero(one) is _REFUSED:
            one.zero_()


def _unscale(held: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> object:
    first = held[0]
    if not isinstance(first, Placeholder):
        return _REFUSED
    if not all(isinstance(one, Placeholder) and one._holder is first._holder for one in held):
        return _REFUSED
    first._holder.unscale(first.dtype, inv_scale, found_inf)
    return None


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.add_.Tensor: _add,
    _aten.zero_.default: _zero,
    _aten.mul_.Tensor: _multiply,
    _aten.div_.Tensor: _divide,
    _aten._foreach_zero_.default: _zero_all,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
