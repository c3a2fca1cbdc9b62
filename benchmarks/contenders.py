"""The contenders: faststep, torch and the rivals, each a function that does one round."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import Parameter

import faststep
from workloads import INIT_SCALE, MAX_NORM, OTHER_OPTIMIZERS, Work

Round = Callable[[], object]

OURS = "faststep"
SWAPPED = "faststep, imports swapped"


class UnavailableError(Exception):
    """A rival that cannot be measured here; the message is shown in its place."""


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    Args:
        name: shown in tables.
        build: makes the optimizer for the parameters and returns the timed round; raises
            :class:`UnavailableError` where the rival is missing or broken.
    """

    name: str
    build: Callable[[Sequence[Parameter]], Round]


@cache
def _rival(module: str, distribution: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] == error.name.split(".")[0]:
            raise UnavailableError(f"not installed (pip install {distribution})") from error
        raise UnavailableError(f"import failed: {error}") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise UnavailableError(f"import failed: {error}") from error


def _scaler(kind: Callable[..., Any], parameters: Sequence[Parameter]) -> Any:
    """A GradScaler that has made its scale."""
    device = parameters[0].device
    scaler = kind(device.type, init_scale=INIT_SCALE)
    scaler.scale(torch.zeros((), device=device))
    return scaler


def chain_of(
    optimizer: torch.optim.Optimizer,
    kind: Callable[..., Any],
    clip: Callable[..., object],
    parameters: Sequence[Parameter],
) -> Round:
    """unscale_, clip, step and update, with a GradScaler of this class."""
    scaler = _scaler(kind, parameters)

    def chain() -> None:
        scaler.unscale_(optimizer)
        clip(parameters, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return chain


def torch_chain(parameters: Sequence[Parameter], **options: Any) -> Round:
    """torch's unscale_, clip_grad_norm_, step and update, with options for its AdamW."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, **options)
    clip = torch.nn.utils.clip_grad_norm_
    return chain_of(optimizer, torch.amp.GradScaler, clip, parameters)


def swapped_chain(parameters: Sequence[Parameter]) -> Round:
    """The same calls with faststep's functions and classes."""
    optimizer = faststep.optim.AdamW(parameters, lr=1e-4)
    return chain_of(optimizer, faststep.amp.GradScaler, faststep.clip_grad_norm_, parameters)


def fused_chain(parameters: Sequence[Parameter], **options: Any) -> Round:
    """faststep's shorter chain, in which the step unscales and clips."""
    optimizer = faststep.optim.AdamW(parameters, lr=1e-4, **options)
    scaler = _scaler(faststep.amp.GradScaler, parameters)

    def chain() -> None:
        scaler.step(optimizer, max_norm=MAX_NORM)
        scaler.update()

    return chain


def _step(make: Callable[..., Any], parameters: Sequence[Parameter], **options: Any) -> Round:
    step: Round = make(list(parameters), lr=1e-4, **options).step
    return step


def _deepspeed(parameters: Sequence[Parameter]) -> Round:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    make = _rival("deepspeed.ops.adam", "deepspeed").DeepSpeedCPUAdam
    try:
        return _step(make, parameters, weight_decay=0.01, adamw_mode=True)
    except (ImportError, OSError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnavailableError(f"its compilation at run time failed: {reason}") from error


def _deepspeed_chain(parameters: Sequence[Parameter]) -> Round:
    """What DeepSpeed's offloaded stages do on the host: norms, scale and clip at once, the step."""
    step = _deepspeed(parameters)

    @torch.no_grad()
    def chain() -> None:
        grads = [param.grad for param in parameters if param.grad is not None]
        norm = torch.stack([grad.norm(2) for grad in grads]).norm(2)
        clip = ((norm / INIT_SCALE + 1e-6) / MAX_NORM).clamp(min=1.0)
        for grad in grads:
            grad.mul_(1.0 / (clip * INIT_SCALE))
        step()

    return chain


def _optimi(name: str, parameters: Sequence[Parameter]) -> Round:
    make = getattr(_rival("optimi", "torch-optimi"), name)
    return _step(make, parameters, weight_decay=0.01)


def _bitsandbytes(name: str, parameters: Sequence[Parameter]) -> Round:
    make = getattr(_rival("bitsandbytes.optim", "bitsandbytes"), name)
    return _step(make, parameters, weight_decay=0.01)


def _torch_step(make: Callable[..., Any], **options: Any) -> Callable[[Sequence[Parameter]], Round]:
    return partial(_step, make, **options)


def _in_halves(
    state_dtype: str, parameters: Sequence[Parameter], round_of: Callable[..., Round] | None = None
) -> Round:
    """faststep's step of bf16 copies, whose masters are remainders, or another round of them."""
    copies = [Parameter(param.detach().bfloat16()) for param in parameters]
    for param, copied in zip(parameters, copies, strict=True):
        copied.grad = None if param.grad is None else param.grad.bfloat16()
    options = {"master_weights": "remainder16", "state_dtype": state_dtype}
    return (round_of or partial(_step, faststep.optim.AdamW))(copies, **options)


def _clip(clip: Callable[..., object]) -> Callable[[Sequence[Parameter]], Round]:
    return lambda parameters: partial(clip, parameters, MAX_NORM)


CONTENDERS: Mapping[str, tuple[Contender, ...]] = MappingProxyType(
    {
        "chain": (
            Contender(OURS, fused_chain),
            Contender(SWAPPED, swapped_chain),
            Contender("torch fused", partial(torch_chain, fused=True)),
            Contender("torch foreach", partial(torch_chain, foreach=True)),
            Contender("torch default", torch_chain),
            Contender("DeepSpeedCPUAdam", _deepspeed_chain),
        ),
        "adamw": (
            Contender(OURS, _torch_step(faststep.optim.AdamW)),
            Contender("torch fused", _torch_step(torch.optim.AdamW, fused=True)),
            Contender("DeepSpeedCPUAdam", _deepspeed),
            Contender("optimi AdamW", partial(_optimi, "AdamW")),
            Contender("bitsandbytes AdamW8bit", partial(_bitsandbytes, "AdamW8bit")),
        ),
        **{
            f"adamw {dtype} states": (
                Contender(OURS, _torch_step(faststep.optim.AdamW, state_dtype=dtype)),
                Contender("torch fused, fp32", _torch_step(torch.optim.AdamW, fused=True)),
                Contender("faststep, fp32", _torch_step(faststep.optim.AdamW)),
                Contender("bitsandbytes AdamW8bit", partial(_bitsandbytes, "AdamW8bit")),
            )
            for dtype in ("bf16", "int8")
        },
        "adamw remainders": (
            Contender(OURS, partial(_in_halves, "bf16")),
            Contender("faststep, fp32 states", partial(_in_halves, "fp32")),
            Contender("torch fused, fp32", _torch_step(torch.optim.AdamW, fused=True)),
        ),
        "adamw remainders int8": (
            Contender(OURS, partial(_in_halves, "int8")),
            Contender("faststep, fp32", _torch_step(faststep.optim.AdamW)),
            Contender("torch fused, fp32", _torch_step(torch.optim.AdamW, fused=True)),
        ),
        "chain remainders int8": (
            Contender(OURS, partial(_in_halves, "int8", round_of=fused_chain)),
            Contender("faststep, fp32", fused_chain),
            Contender("torch fused, fp32", partial(torch_chain, fused=True)),
        ),
        "sgd": (
            Contender(OURS, _torch_step(faststep.optim.SGD, momentum=0.9)),
            Contender("torch fused", _torch_step(torch.optim.SGD, momentum=0.9, fused=True)),
        ),
        "lion": (
            Contender(OURS, _torch_step(faststep.optim.Lion, weight_decay=0.01)),
            Contender("optimi Lion", partial(_optimi, "Lion")),
        ),
        **{
            name.lower(): (
                Contender(OURS, _torch_step(getattr(faststep.optim, name))),
                Contender("torch default", _torch_step(getattr(torch.optim, name))),
            )
            for name in OTHER_OPTIMIZERS
        },
        "clip": (
            Contender(OURS, _clip(faststep.clip_grad_norm_)),
            Contender("torch", _clip(torch.nn.utils.clip_grad_norm_)),
        ),
    }
)


def contenders_of(work: Work) -> tuple[Contender, ...]:
    """The contenders of a work, ours first."""
    everyone = CONTENDERS[work.family]
    return tuple(c for c in everyone if not work.only or c.name in work.only)
