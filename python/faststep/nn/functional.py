"""The cross-entropy of logits, in one pass forward and one backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as _torchs
from torch.overrides import has_torch_function

from .. import _C
from .._torch.modes import is_transformed, is_watched

__all__ = ["cross_entropy"]

_REDUCTIONS = ("none", "mean", "sum")
_LONG = 2**63
_CLASSES, _LOGITS = 1024, 1 << 18  # smaller ones stay in the caches, where torch is as fast


class _Arguments(NamedTuple):
    """What forward got beside the logits, as it will be passed to C or to torch."""

    target: Tensor
    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float


class _Found(NamedTuple):
    """What forward has computed."""

    rows: Tensor
    loss: Tensor
    factor: float  # of the gradient of each row's loss


class _CrossEntropy(torch.autograd.Function):
    """Connects what C has found with autograd."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, given: _Arguments, found: _Found) -> Tensor:
        ctx.save_for_backward(logits, given.target, given.weight, found.rows)
        ctx.options, ctx.factor, ctx.dtype = given[2:], found.factor, found.loss.dtype
        return found.loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, target, weight, rows = ctx.saved_tensors
        given = _Arguments(target, weight, *ctx.options)
        differentiable = torch.is_grad_enabled()  # create_graph=True
        if not differentiable and not torch.compiler.is_compiling() and not _is_seen():
            out = torch.empty(logits.shape, dtype=logits.dtype, device="cpu")
            of_losses, options = grad.float(), (given.ignore_index, given.label_smoothing)
            if _C.cross_entropy_backward(
                logits, target, weight, rows, of_losses, out, *options, ctx.factor
            ):
                return out, None, None
        with torch.enable_grad():
            if not differentiable or not logits.requires_grad:
                logits = logits.detach().requires_grad_()
            loss = _torchs(logits.to(ctx.dtype), **given._asdict())
        (out,) = torch.autograd.grad(loss, logits, grad, create_graph=differentiable)
        return out, None, None


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross-entropy of logits, as :func:`torch.nn.functional.cross_entropy` computes it.

    Forward reads the logits once, backward reads them once and writes their gradient; all sums are
    fp32 or double. The result has the same bits for every number of threads and instruction set.
    It differs from torch's in the last bits, and is never less precise. Between forward and
    backward the logits must not be written: autograd raises its RuntimeError then.

    C computes it for at least 2^18 logits (N, C) of 1024 classes or more in float32, bfloat16 or
    float16 in CPU memory, whose rows are contiguous, and a target (N) of int64; with class weights
    only in float32 or under autocast, and without label smoothing. torch's own function computes
    all else, with its results and errors: class probabilities as a target, other shapes, dtypes and
    devices (CUDA too), subclasses, modes, torch.compile, tracing, `torch.func`, forward-mode
    differentiation, and the gradient of a gradient.

    Args:
        input: logits of shape (N, C), or another one that torch takes. Under autocast they are read
            as they are, and the loss is float32; otherwise it has their dtype.
        target: the class of each row, of shape (N).
        weight: a number per class.
        size_average: deprecated; see torch.
        ignore_index: the target of rows that count nothing.
        reduce: deprecated; see torch.
        reduction: "none", "mean" or "sum".
        label_smoothing: the share of all classes in each target, between 0 and 1.
    """
    given = _Arguments(target, weight, ignore_index, reduction, label_smoothing)
    if size_average is None and reduce is None and not torch.compiler.is_compiling():
        found = _found(input, given)
        if found is not None:
            if torch.is_grad_enabled() and input.requires_grad:
                loss: Tensor = _CrossEntropy.apply(input, given, found)  # type: ignore[no-untyped-call]
                return loss
            return found.loss
    return _torchs(
        input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )


def _is_seen() -> bool:
    """True where somebody sees torch's operators, or transforms them."""
    return bool(is_watched() or is_transformed())


def _found(logits: Tensor, given: _Arguments) -> _Found | None:
    """Forward by C; None where torch's function has to do it."""
    target, weight, ignored, reduction, smoothing = given
    tensors = (logits, target, weight)
    if (
        has_torch_function(tensors)
        or not isinstance(logits, Tensor)
        or _is_seen()
        or logits.device.type != "cpu"
        or logits.ndim != 2
        or logits.shape[1] < _CLASSES
        or logits.numel() < _LOGITS
        or reduction not in _REDUCTIONS
        or type(ignored) is not int
        or not -_LONG <= ignored < _LONG
        or type(smoothing) not in (int, float)
        or not 0 <= smoothing <= 1
    ):
        return None
    is_cast = torch.is_autocast_enabled("cpu")
    dtype = torch.float32 if is_cast else logits.dtype
    if weight is not None and (weight.requires_grad or dtype != torch.float32 or smoothing):
        return None
    count = len(logits)
    rows = torch.empty(2, count, dtype=torch.float32, device="cpu")
    losses = torch.empty(count, dtype=torch.float32, device="cpu")
    sums = _C.cross_entropy(logits, target, weight, rows, losses, ignored, smoothing)
    if sums is None:
        return None
    if reduction == "none":
        return _Found(rows, losses.to(dtype), 1.0)
    total, weights = sums
    factor = 1.0
    if reduction == "mean":
        factor = 1.0 / weights if weights else float("inf")
        total = total / weights if weights else total * float("inf")
    return _Found(rows, torch.tensor(total, dtype=dtype, device="cpu"), factor)
