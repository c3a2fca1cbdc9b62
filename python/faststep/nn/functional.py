"""The cross-entropy of logits, and its gradient in the same pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as _torchs
from torch.overrides import has_torch_function

from .. import _C
from .._devices import has_kernels_for
from .._torch.modes import is_batched, is_transformed, is_watched
from .._torch.saved_tensors import are_hooked, is_free

__all__ = ["cross_entropy"]

_REDUCTIONS = ("none", "mean", "sum")
_LONG = 2**63
_CLASSES, _LOGITS = 1024, 1 << 18  # smaller ones stay in the caches, where torch is as fast
_LOGITS_ON_CUDA = 1 << 24  # of smaller ones the device saves less than the host takes longer


class _Arguments(NamedTuple):
    """What forward got beside the logits, as it will be passed to C or to torch."""

    target: Tensor
    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float


class _Found(NamedTuple):
    """What C has computed."""

    loss: Tensor
    likelihoods: Tensor  # the softmax of each row's target
    slope: Tensor | None  # the gradient of the loss, or a multiple of it; None: not asked for
    factors: Tensor | None  # of each row in `slope`, and what that is to be multiplied by; None: 1


class _CrossEntropy(torch.autograd.Function):
    """Connects with autograd what C has computed.

    The slope is an output too, so it can be differentiated. The logits are not saved.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, given: _Arguments, found: _Found) -> tuple[Any, ...]:
        tensors = found.slope, found.likelihoods, given.target, given.weight
        ctx.save_for_backward(*(one for one in tensors if one is not None))
        ctx.set_materialize_grads(False)
        ctx.given, ctx.factors = given[2:], found.factors
        ctx.is_hooked = are_hooked()
        return found.loss, found.slope

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, of_slope: Tensor | None) -> tuple[Any, ...]:
        slope, likelihoods, target, *weights = ctx.saved_tensors
        grads = []
        if of_slope is not None:
            given = _Arguments(target, weights[0] if weights else None, *ctx.given)
            grads.append(_curved(slope, likelihoods, of_slope, given, ctx.factors))
        if of_loss is not None:
            by = of_loss.float()
            if ctx.factors is not None and slope.dtype == torch.float16:
                by = by * ctx.factors[1]
            by = by.unsqueeze(1) if by.ndim else by
            is_seen = torch.compiler.is_compiling() or _is_seen(by)
            if ctx.is_hooked or torch.is_grad_enabled() or is_seen or not is_free(slope):
                grads.append((slope * by).to(slope.dtype))
            elif by.ndim:
                grads.append(slope.detach().mul_(by))
            elif by.is_cuda:  # the host does not know whether it is 1, but the kernel does
                _C.device_unscale([slope.detach()], by, None, True)
                grads.append(slope.detach())
            else:
                grads.append(slope.detach() if by.item() == 1 else slope.detach().mul_(by))
        return sum(grads[1:], grads[0]), None, None


class _Smoothed(_CrossEntropy):
    """With label smoothing."""


# The names of torch's, which a script prints with a loss.
for _node, _name in (
    (_CrossEntropy._backward_cls, "NllLossBackward0"),
    (_Smoothed._backward_cls, "AddBackward0"),
):
    _node.__module__, _node.__name__, _node.__qualname__ = "builtins", _name, _name


def _curved(
    slope: Tensor, likelihoods: Tensor, by: Tensor, given: _Arguments, factors: Tensor | None
) -> Tensor:
    """The product of the derivative of the slope, a symmetric matrix per row, and a tensor."""
    target, weight, ignored, _, smoothing = given
    counts = target != ignored
    classes = target.where(counts, 0).unsqueeze(1)
    of_all = torch.where(counts, 1.0 if factors is None else factors[0], 0.0)
    of_target = of_all * (1 - smoothing)
    if weight is not None:
        of_target = of_target * weight[classes.squeeze(1)]
    share = (of_all * (smoothing / slope.shape[1])).unsqueeze(1)
    softmax = (slope.float() + share).scatter_add(1, classes, of_target.unsqueeze(1))
    # The slope of the target, rounded to 16 bits, has lost a softmax that is small.
    right = (likelihoods * (of_target + of_all * smoothing)).unsqueeze(1)
    lost = (right - softmax.gather(1, classes)).detach()
    softmax = softmax.scatter_add(1, classes, lost)
    product, total = softmax * by, softmax.sum(1, keepdim=True)
    mean = product.sum(1, keepdim=True) / total.where(total != 0, 1)
    return (product - softmax * mean).to(slope.dtype)


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

    Forward reads the logits once and writes their gradient, if they need one; all sums are fp32 or
    double. Backward multiplies it by that of the loss, or returns it as it is where that is 1. The
    result has the same bits for every number of threads and instruction set. It differs from
    torch's in the last bits.

    C computes it for at least 2^18 logits (N, C) of 1024 classes or more, and a CUDA kernel for at
    least 2^24, in float32, bfloat16 or float16, whose rows are contiguous, and a target (N) of
    int64; with class weights only in float32 or under autocast, and without label smoothing.
    torch's own function computes all else, with its results and errors: class probabilities as a
    target, other shapes, dtypes and devices, subclasses, modes, torch.compile, tracing,
    `torch.func`, and forward-mode differentiation.

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
        if found is not None and found.slope is not None:
            function = _Smoothed if label_smoothing else _CrossEntropy
            return function.apply(input, given, found)[0]  # type: ignore[no-any-return,no-untyped-call]
        if found is not None:
            return found.loss
    return _torchs(
        input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )


def _is_seen(tensor: Tensor) -> bool:
    """True where somebody sees torch's operators, or transforms them."""
    return is_watched() or is_transformed() or is_batched(tensor)


def _found(logits: Tensor, given: _Arguments) -> _Found | None:
    """Forward by C; None where torch's function has to do it."""
    target, weight, ignored, reduction, smoothing = given
    tensors = (logits, target, weight)
    if (
        has_torch_function(tensors)
        or not isinstance(logits, Tensor)
        or _is_seen(logits)
        or not (logits.is_cpu or (logits.is_cuda and has_kernels_for(logits)))
        or logits.ndim != 2
        or logits.shape[1] < _CLASSES
        or logits.numel() < (_LOGITS_ON_CUDA if logits.is_cuda else _LOGITS)
        or reduction not in _REDUCTIONS
        or type(ignored) is not int
        or not -_LONG <= ignored < _LONG
        or type(smoothing) not in (int, float)
        or not 0 <= smoothing <= 1
    ):
        return None
    is_cast = torch.is_autocast_enabled(logits.device.type)
    dtype = torch.float32 if is_cast else logits.dtype
    if weight is not None and (
        not isinstance(weight, Tensor)
        or weight.requires_grad
        or dtype != torch.float32
        or smoothing
    ):
        return None
    count, device = len(logits), logits.device
    losses, likelihoods = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(2))
    loss, factors = (torch.empty(n, dtype=torch.float32, device=device) for n in ((), (2,)))
    slope = None
    if torch.is_grad_enabled() and logits.requires_grad and not torch.is_inference_mode_enabled():
        slope = torch.empty(logits.shape, dtype=logits.dtype, device=device)
    rows, results, is_mean = (losses, likelihoods), (loss, factors), reduction == "mean"
    if not _C.cross_entropy(
        logits, target, weight, *rows, slope, *results, ignored, smoothing, is_mean
    ):
        return None
    if reduction == "none":
        return _Found(losses.to(dtype), likelihoods, slope, None)
    return _Found(loss.to(dtype), likelihoods, slope, factors if is_mean else None)
