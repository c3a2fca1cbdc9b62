"""Checks that optimizers and the scaler share, with torch's errors where torch has them."""

from __future__ import annotations

from torch.optim import Optimizer

__all__ = ["check_limit", "has_grads", "refuse_unchecked"]


def check_limit(name: str, value: float | None) -> None:
    """Raise for a norm that nothing can be clipped to; None is no limit."""
    if value is not None and not value >= 0.0:
        raise ValueError(f"Invalid {name} value: {value}")


def has_grads(optimizer: Optimizer) -> bool:
    """True if any parameter has a gradient."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                return True
    return False


def refuse_unchecked(optimizer: Optimizer) -> None:
    """Raise for gradients that came after the scaler had looked for some, and found none."""
    if has_grads(optimizer):
        raise AssertionError("No inf checks were recorded for this optimizer.")
