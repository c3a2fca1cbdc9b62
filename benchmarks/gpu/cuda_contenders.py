"""Who is measured on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

import faststep
from contenders import (
    OURS,
    SWAPPED,
    Contender,
    Round,
    chain_of,
    fused_chain,
    swapped_chain,
    torch_chain,
)
from cuda_works import FOREACH, FUSED
from workloads import INIT_SCALE, MAX_NORM, Work

__all__ = ["COMPILED", "cuda_contenders_of"]

COMPILED = "torch.compile"
APEX = "apex-style"


def _clip_and_step(clip: Callable[..., object], make: Any) -> Callable[..., Round]:
    def build(parameters: Sequence[Parameter], **options: Any) -> Round:
        optimizer = make(parameters, lr=1e-4, **options)

        def round_() -> None:
            clip(parameters, MAX_NORM)
            optimizer.step()

        return round_

    return build


def _compiled(parameters: Sequence[Parameter], family: str) -> Round:
    """The chain of torch with a compiled step; the rest is as it is, since it is not torch's to
    compile: the scaler looks at the overflow on the host.
    """
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    step = torch.compile(optimizer.step)
    if family == "cuda clip":

        def clipped() -> None:
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            step()

        return clipped
    optimizer.step = step  # type: ignore[method-assign]
    clip = torch.nn.utils.clip_grad_norm_
    return chain_of(optimizer, torch.amp.GradScaler, clip, parameters)


def _apex_style(parameters: Sequence[Parameter], family: str) -> Round:
    """One multi-tensor pass each to unscale, measure, clip and update, as apex has them, on lists
    of tensors that are made anew in each step, and without a wait for the device.
    """
    params = list(parameters)
    device = params[0].device
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    count = torch.zeros((), device=device)
    scale = torch.full((), INIT_SCALE, device=device)
    growth = torch.zeros((), dtype=torch.int32, device=device)
    numbers = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 1e-2, "eps": 1e-8}

    @torch.no_grad()
    def round_() -> None:
        grads = [p.grad for p in params if p.grad is not None]
        found = torch.zeros((), device=device)
        if family == "cuda chain":
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale.reciprocal())
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, (MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
        count.add_(1.0 - found)
        torch._fused_adamw_(
            params,
            grads,
            *moments,
            [],
            [count] * len(params),
            **numbers,
            amsgrad=False,
            maximize=False,
            found_inf=found,
        )
        if family == "cuda chain":
            torch._amp_update_scale_(scale, growth, found, 2.0, 0.5, 2000)

    return round_


def _step(make: Any, **options: Any) -> Callable[[Sequence[Parameter]], Round]:
    def build(parameters: Sequence[Parameter]) -> Round:
        round_: Round = make(parameters, lr=1e-4, **options).step
        return round_

    return build


def cuda_contenders_of(work: Work) -> tuple[Contender, ...]:
    """Ours first; those at the end are left out first where memory is short."""
    torchs = _clip_and_step(torch.nn.utils.clip_grad_norm_, torch.optim.AdamW)
    ours = _clip_and_step(faststep.clip_grad_norm_, faststep.optim.AdamW)
    rest = (
        Contender(APEX, partial(_apex_style, family=work.family)),
        Contender(COMPILED, partial(_compiled, family=work.family)),
    )
    if work.family == "cuda chain":
        everyone = (
            Contender(OURS, fused_chain),
            Contender(FUSED, partial(torch_chain, fused=True)),
            Contender(FOREACH, partial(torch_chain, foreach=True)),
            Contender(SWAPPED, swapped_chain),
            *rest,
        )
    elif work.family == "cuda clip":
        everyone = (
            Contender(OURS, _step(faststep.optim.AdamW, max_grad_norm=MAX_NORM)),
            Contender(FUSED, partial(torchs, fused=True)),
            Contender(FOREACH, partial(torchs, foreach=True)),
            Contender(SWAPPED, ours),
            *rest,
        )
    elif work.family.endswith(" states"):
        few = work.family.split()[1]
        everyone = (
            Contender(OURS, _step(faststep.optim.AdamW, state_dtype=few)),
            Contender(FUSED, _step(torch.optim.AdamW, fused=True)),
        )
    else:
        everyone = (
            Contender(OURS, _step(faststep.optim.AdamW)),
            Contender(FUSED, _step(torch.optim.AdamW, fused=True)),
            Contender(FOREACH, _step(torch.optim.AdamW, foreach=True)),
        )
    return tuple(c for c in everyone if not work.only or c.name in work.only)
