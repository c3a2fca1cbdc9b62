"""Works that are no plain steps: images, the cross-entropy, updates in backward, and graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import faststep
from contenders import OURS, Round
from cuda_images import image_batch, image_rounds, image_work
from cuda_works import FUSED, NAMES, REHEARSAL, TINY, shapes_of
from faststep.nn.functional import cross_entropy
from workloads import MAX_NORM, Arena, Work

__all__ = ["CASES", "Case"]

AFTER = "faststep, step after backward"
LOGITS = [(8, 64)] if TINY else [(8192, 50304), (2048, 8192)]


@dataclass(frozen=True)
class Case:
    """A work, and what makes the round of each contender on a device."""

    work: Work
    rounds: Callable[[str], Mapping[str, Round]]


def _losses(shape: tuple[int, int], dtype: torch.dtype, device: str) -> Mapping[str, Round]:
    """Forward and backward on logits that a model made; bf16 ones under autocast."""
    logits = torch.randn(shape, device=device).to(dtype).requires_grad_()
    target = torch.randint(shape[1], shape[:1], device=device)

    def round_(function: Callable[..., Tensor]) -> None:
        logits.grad = None
        with torch.autocast(device, torch.bfloat16, enabled=dtype != torch.float32):
            loss = function(logits, target)
        loss.backward()

    functions = {OURS: cross_entropy, "torch": nn.functional.cross_entropy}
    return {name: partial(round_, function) for name, function in functions.items()}


class _Passed(torch.autograd.Function):
    """Hands its first argument on; in backward a parameter gets a copy of its gradient."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], ctx.gradient.clone(), None


def _updates(work: Work, device: str) -> Mapping[str, Round]:
    """A backward pass and the updates: in it, and after it."""

    def round_of(make: Any, release: bool) -> Round:
        parameters = Arena(work, device=device).parameters
        gradients = [parameter.grad for parameter in parameters]
        model = nn.ParameterList(parameters)
        optimizer = make(parameters, lr=1e-4)
        optimizer.zero_grad()
        held = faststep.release_gradients(model, optimizer) if release else None
        start = torch.zeros((), device=device, requires_grad=True)

        def round_() -> None:
            end = start
            for parameter, gradient in zip(parameters, gradients, strict=True):
                end = _Passed.apply(end, parameter, gradient)
            end.backward()
            optimizer.step()
            if held is None:
                optimizer.zero_grad()

        return round_

    return {
        OURS: round_of(faststep.optim.AdamW, True),
        AFTER: round_of(faststep.optim.AdamW, False),
        FUSED: round_of(partial(torch.optim.AdamW, fused=True), False),
    }


def _replays(work: Work, device: str) -> Mapping[str, Round]:
    """Clipping and the step, captured; on the CPU, for rehearsals, as they are."""

    def round_of(make: Any, clip: bool) -> Round:
        parameters = Arena(work, device=device).parameters
        optimizer = make(parameters, lr=1e-4, capturable=not REHEARSAL)

        def round_() -> None:
            if clip:
                nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            optimizer.step()

        if REHEARSAL:
            return round_
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            round_()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            round_()

        def replay(_held: Round = round_) -> None:  # with the tensors that the graph works on
            graph.replay()

        return replay

    return {
        OURS: round_of(partial(faststep.optim.AdamW, max_grad_norm=MAX_NORM), False),
        FUSED: round_of(partial(torch.optim.AdamW, fused=True), True),
    }


def _cases() -> list[Case]:
    cases = []
    for shape in LOGITS:
        for dtype, name in NAMES.items():
            label = f"{shape[0]} x {shape[1]}, {name}"
            work = Work("cuda cross-entropy", label, (shape,), dtype=dtype)
            cases.append(Case(work, partial(_losses, shape, dtype)))
    for family, rounds in (("cuda release", _updates), ("cuda graph", _replays)):
        work = Work(family, "GPT-2 small, fp32", shapes_of("GPT-2 small"))
        cases.append(Case(work, partial(rounds, work)))
    return [*cases, Case(image_work(), lambda device: image_rounds(image_batch().to(device)))]


CASES = _cases()
