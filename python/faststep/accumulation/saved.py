"""The state of a window, from which training resumes inside the window."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..grads import divide as division
from .window import Window

_NAMES = (
    *("steps", "normalize", "micro_step", "count", "ready", "divisors"),
    *("windows", "empty", "discarded", "gradients"),
)


def state_of(window: Window) -> dict[str, Any]:
    """Numbers, strings and tensors only; gradients as they are, not copied."""
    ready = window.ready and not window.steps_taken.are_all()
    open_window = bool(window.micro_step or ready)
    if window.micro_step and window.ranks.keeps_sums:
        raise RuntimeError(
            "state_dict() inside a window: the sums of its gradients are inside FSDP2, which does "
            "not show them; save when a window is complete, or leave model= away"
        )
    if open_window and window.sums is not None:
        window.sums.add_waiting()
    grads = [_sum_of(window, param) if open_window else None for _, param in window.named_params()]
    divisors = [division.divisor_of(optimizer) for optimizer in window.optimizers]
    return {
        "steps": window.steps,
        "normalize": window.normalize,
        "micro_step": window.micro_step,
        "count": window.count,
        "ready": ready,
        "divisors": divisors if ready else None,
        "windows": window.windows,
        "empty": window.empty,
        "discarded": window.discarded(),
        "gradients": grads,
    }


def restore(window: Window, state: dict[str, Any]) -> None:
    """Check everything, then change the window and its parameters' gradients."""
    if missing := [name for name in _NAMES if name not in state]:
        raise ValueError(f"this is no state of an accumulation: it has no {missing[0]!r}")
    for name in ("steps", "normalize"):
        if state[name] != getattr(window, name):
            raise ValueError(
                f"the state is of {name}={state[name]!r}, this accumulation of "
                f"{name}={getattr(window, name)!r}"
            )
    params, grads = window.named_params(), state["gradients"]
    if len(params) != len(grads):
        raise ValueError(f"the state has {len(grads)} gradients, for {len(params)} parameters")
    divisors = state["divisors"]
    if divisors is not None and len(divisors) != len(window.optimizers):
        raise ValueError(
            f"the state is of {len(divisors)} optimizers, this accumulation of "
            f"{len(window.optimizers)}"
        )
    for (name, param), grad in zip(params, grads, strict=True):
        if grad is not None:
            _check(window, name, param, grad)
    window.close(counts=False)
    if window.sums is not None:
        window.sums.attach(params)
        window.sums.forget()
    for (_, param), grad in zip(params, grads, strict=True):
        param.grad = None
        if grad is None:
            continue
        # Gradients of a complete window were rounded for optimizers that are not of faststep.
        rounded = state["ready"] and grad.dtype == param.dtype
        if rounded or window.sums is None or not window.sums.put(param, grad):
            param.grad = grad.detach().to(param.device, copy=True)
    window.micro_step, window.count = state["micro_step"], state["count"]
    window.windows, window.empty = state["windows"], state["empty"]
    window.skipped, window.ready = state["discarded"], state["ready"]
    if window.ready:
        if window.sums is not None:
            window.sums.end_window()
        for optimizer, divisor in zip(window.optimizers, divisors, strict=True):
            if divisor is not None:
                division.defer(optimizer, divisor)
    window.mark()


def _sum_of(window: Window, param: Tensor) -> Tensor | None:
    hidden = None if window.sums is None else window.sums.hidden(param)
    return param.grad if hidden is None else hidden


def _check(window: Window, name: str, param: Tensor, grad: Tensor) -> None:
    if grad.shape != param.shape:
        raise ValueError(
            f"the gradient of {name} has shape {tuple(grad.shape)} in the state, the parameter "
            f"{tuple(param.shape)}"
        )
    sums = window.sums is not None and param in window.sums
    if not sums and grad.dtype != param.dtype:
        raise ValueError(
            f"the gradient of {name} is {grad.dtype} in the state, the parameter {param.dtype}; "
            "pass the same dtype= to accumulate() as before"
        )
