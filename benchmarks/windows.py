"""What accumulation and release add to a window: python benchmarks/windows.py KIND SHAPES ROUNDS.

Prints the seconds of every round as JSON. KIND is "sums" (bf16 parameters, fp32 sums: eight
micro-gradients arrive, are added up, divided, clipped and stepped with), "mean" (fp32: division,
clipping and step at a window's end) or "release" (what updates in backward, and the step that ends
them, add to a backward pass). Gradients come from nowhere, so that no forward and no backward is in
the figures; where hooks take part, from a backward pass that does nothing else, and whose time
without them is taken off.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

import faststep
from contenders import OURS
from workloads import MAX_NORM, SHAPES, Shapes

STEPS = 8
BY_HAND = "torch, by hand"
IN_PAIRS = "faststep, in pairs"
RECIPE = "torch, an optimizer per parameter"

Round = Callable[[], float]
Times = dict[str, list[float]]


def parameters_of(shapes: Shapes, dtype: torch.dtype) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.empty(s).normal_(0.0, 0.02, generator=generator) for s in shapes)
    return [Parameter(tensor.to(dtype)) for tensor in drawn]


def clocked(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def give(params: Sequence[Parameter], grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def sums_of_ours(params: list[Parameter], grads: list[Tensor], in_pairs: bool = False) -> Round:
    optimizer = faststep.optim.AdamW(params, lr=1e-4, max_grad_norm=MAX_NORM)
    accum = faststep.accumulate(optimizer, STEPS, dtype=torch.float32, in_pairs=in_pairs)

    def window() -> None:
        for _ in range(STEPS):
            with accum:
                give(params, grads)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: clocked(window)


def sums_in_pairs(params: list[Parameter], grads: list[Tensor]) -> Round:
    return sums_of_ours(params, grads, in_pairs=True)


def sums_by_hand(params: list[Parameter], grads: list[Tensor]) -> Round:
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    totals = [torch.zeros_like(param, dtype=torch.float32) for param in params]

    def window() -> None:
        for _ in range(STEPS):
            give(params, grads)
            for param, total in zip(params, totals, strict=True):
                total.add_(param.grad.float())
                param.grad = None
        for param, total in zip(params, totals, strict=True):
            total.div_(STEPS)
            param.grad = total.to(param.dtype)
            total.zero_()
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: clocked(window)


def refilled(grads: list[Tensor], sums: list[Tensor]) -> None:
    """The last one first, as backward does."""
    for total, grad in zip(sums[::-1], grads[::-1], strict=True):
        total.copy_(grad)


def mean_of_ours(params: list[Parameter], grads: list[Tensor]) -> Round:
    optimizer = faststep.optim.AdamW(params, lr=1e-4, max_grad_norm=MAX_NORM)
    accum = faststep.accumulate(optimizer, STEPS)
    sums = [torch.empty_like(grad) for grad in grads]

    def one() -> float:
        for step in range(STEPS):
            with accum:
                if step == STEPS - 1:
                    refilled(grads, sums)
                    give(params, sums)
        seconds = clocked(optimizer.step)
        optimizer.zero_grad()
        return seconds

    return one


def mean_by_hand(params: list[Parameter], grads: list[Tensor]) -> Round:
    """The division is in the losses: loss / N."""
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    sums = [torch.empty_like(grad) for grad in grads]

    def end() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    def one() -> float:
        refilled(grads, sums)
        give(params, sums)
        return clocked(end)

    return one


class Give(torch.autograd.Function):
    """A scalar whose backward hands a gradient to every parameter, and computes nothing."""

    @staticmethod
    def forward(ctx, grads, *params):  # type: ignore[no-untyped-def]
        ctx.grads = grads
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        return (None, *ctx.grads)


def backward_of(params: list[Parameter], grads: list[Tensor]) -> float:
    loss = Give.apply(grads, *params)
    return clocked(loss.backward)


def release_of_ours(params: list[Parameter], grads: list[Tensor]) -> Round:
    optimizer = faststep.optim.AdamW(params, lr=1e-4)
    release = faststep.release_gradients(torch.nn.ParameterList(params), optimizer)

    def one() -> float:
        seconds = backward_of(params, grads) + clocked(optimizer.step)
        assert release is not None
        return seconds

    return one


def release_by_recipe(params: list[Parameter], grads: list[Tensor]) -> Round:
    """docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html"""
    optimizers = {param: torch.optim.AdamW([param], lr=1e-4, fused=True) for param in params}

    def update(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in params:
        param.register_post_accumulate_grad_hook(update)
    return lambda: backward_of(params, grads)


def alone(params: list[Parameter], grads: list[Tensor]) -> Round:
    def one() -> float:
        seconds = backward_of(params, grads)
        for param in params:
            param.grad = None
        return seconds

    return one


def measured(kind: str, shapes: Shapes, rounds: int) -> Times:
    """The contenders one after another in each round, each on parameters of its own."""
    dtype = torch.bfloat16 if kind == "sums" else torch.float32
    makers: dict[str, dict[str, Callable[[list[Parameter], list[Tensor]], Round]]] = {
        "sums": {OURS: sums_of_ours, IN_PAIRS: sums_in_pairs, BY_HAND: sums_by_hand},
        "mean": {OURS: mean_of_ours, BY_HAND: mean_by_hand},
        "release": {OURS: release_of_ours, RECIPE: release_by_recipe, "": alone},
    }
    grads = [param.detach().clone() for param in parameters_of(shapes, dtype)]
    contenders = {n: make(parameters_of(shapes, dtype), grads) for n, make in makers[kind].items()}
    for one in contenders.values():
        one()  # makes states and plans
    times: Times = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, one in contenders.items():
            times[name].append(one())
    if "" in times:
        plain = statistics.median(times.pop(""))
        times = {name: [max(t - plain, 1e-9) for t in taken] for name, taken in times.items()}
    return times


def main(kind: str, label: str, rounds: int) -> None:
    if label in SHAPES:
        shapes = SHAPES[label]()
    else:
        tensors, elements = map(int, label.split(" x "))
        shapes = ((elements,),) * tensors
    print(json.dumps(measured(kind, shapes, rounds)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
