"""Gradient accumulation: windows of micro-batches that give the update of one large batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from .._torch.ranks import is_distributed
from ..grads.owners import accumulating, releasing
from ..grads.params import params_of
from ..optim.wrapped import unwrapped
from .helper import Accumulation
from .reduction import is_sharded
from .window import Normalize, Window

__all__ = ["Accumulation", "accumulate"]


def accumulate(
    optimizer: Optimizer | Iterable[Optimizer],
    steps: int,
    *,
    model: nn.Module | None = None,
    normalize: Normalize = "mean",
    dtype: torch.dtype | None = None,
    in_pairs: bool = False,
) -> Accumulation:
    """Accumulate gradients over windows of `steps` micro-batches.

    ::

        accum = faststep.accumulate(optimizer, steps=8, model=model)
        for x, y in loader:
            with accum:
                accum.backward(loss_fn(model(x), y))
            if accum.ready:
                optimizer.step()
                optimizer.zero_grad()
        if accum.flush():  # the last window, if it is shorter
            optimizer.step()
            optimizer.zero_grad()

    The gradients of a window are summed up, and divided once, inside the optimizer's step: until
    then `.grad` is the sum. See docs/accumulation.md.

    Args:
        optimizer: an optimizer, or several that are stepped together. faststep's and torch's fused
            ones divide inside their step; gradients of others are divided at the window's end.
        steps: micro-steps per window, at least 1.
        model: the module that the loop calls. DistributedDataParallel and models of fully_shard
            then communicate in the last micro-step of a window only. Default: None.
        normalize: what the sum of a window is divided by. "mean": the number of micro-steps, for
            losses that are means over micro-batches of one size. "sum": nothing. "tokens": the
            total that `add_count` was given in the window, on all ranks, for losses that are sums.
            Default: "mean".
        dtype: torch.float32 sums the gradients of bfloat16 and float16 parameters in fp32; for
            the time of the training their `.grad` is fp32. Default: None, as autograd does it.
        in_pairs: with dtype=torch.float32, add two gradients of a parameter to its sum at a time,
            with the same bits: 12 bytes of memory traffic per element instead of 20. The first of
            two waits for another forward and backward pass, and the `.grad` of these parameters
            is None until the window's end. Default: False.

    Returns:
        An :class:`.Accumulation`; keep it.

    Raises:
        TypeError: an argument of the wrong type, or a model that is sharded; in the first
            micro-step, a `model` that is inside of a DistributedDataParallel.
        ValueError: `steps`, `normalize` or `dtype` out of range, `in_pairs` without a dtype, a
            parameter of two optimizers, or accelerate's own accumulation is on.
        RuntimeError: the optimizer accumulates already.
    """
    optimizers = _unwrapped(optimizer)
    _check_options(steps, model, normalize, dtype, in_pairs)
    _check_optimizers(optimizers, dtype)
    return Accumulation(Window(optimizers, steps, model, normalize, dtype, in_pairs))


def _unwrapped(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers whose steps divide, taken out of what accelerate has put around them."""
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(one).__name__}")
    optimizers = [unwrapped(one, "accumulate()") for one in optimizers]
    if not optimizers:
        raise ValueError("accumulate() got no optimizer")
    return optimizers


def _check_options(
    steps: int,
    model: nn.Module | None,
    normalize: Normalize,
    dtype: torch.dtype | None,
    in_pairs: bool,
) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise TypeError(f"steps must be an int, not {type(steps).__name__}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    if normalize not in ("mean", "sum", "tokens"):
        raise ValueError(f'normalize must be "mean", "sum" or "tokens", not {normalize!r}')
    if dtype not in (None, torch.float32):
        raise ValueError(f"dtype must be None or torch.float32, not {dtype}")
    if in_pairs and dtype is None:
        raise ValueError("in_pairs=True is for sums in fp32: pass dtype=torch.float32 too")
    if model is None and normalize == "tokens" and is_distributed():
        raise ValueError(
            'normalize="tokens" on several ranks needs model=: the DistributedDataParallel module, '
            "over whose ranks tokens are counted, or a plain module to count on each rank alone"
        )


def _check_optimizers(optimizers: Sequence[Optimizer], dtype: torch.dtype | None) -> None:
    """Raise for optimizers whose gradients cannot be summed up, alone or together."""
    sharded = [one for one in optimizers if is_sharded(one)]
    if sharded and len(optimizers) > 1:
        raise TypeError("accumulate() takes a sharded optimizer alone, not several together")
    if dtype is not None and not all(one.sums_in_fp32 for one in sharded):
        raise TypeError(
            "accumulate() with dtype= of a sharded optimizer needs shard(master_weights=True), at "
            "stages 1 and 2: else the ranks add up in the dtype of the parameters"
        )
    _check_unowned(optimizers)
    _check_disjoint(optimizers)


def _check_unowned(optimizers: Sequence[Optimizer]) -> None:
    """Raise if the gradients of one of the optimizers are handled already."""
    for optimizer in optimizers:
        if optimizer in releasing:
            raise RuntimeError(
                f"gradients of this {type(optimizer).__name__} are released in backward "
                "(release_gradients), so they cannot be accumulated: remove() the release first"
            )
        if optimizer in accumulating:
            raise RuntimeError(
                f"gradients of this {type(optimizer).__name__} are accumulated already; call "
                "remove() on what accumulate() returned before"
            )


def _check_disjoint(optimizers: Sequence[Optimizer]) -> None:
    """Raise if two of the optimizers have a parameter in common."""
    seen: set[int] = set()
    for number, optimizer in enumerate(optimizers):
        params = params_of(optimizer)
        for index, param in enumerate(params):
            if id(param) in seen:
                raise ValueError(
                    f"parameter {index} of optimizer {number} ({type(optimizer).__name__}) is in "
                    "another optimizer too: its gradient would be divided by both"
                )
        seen.update(map(id, params))
