"""Takes the optimizer out of a framework's wrapper, because hooks must sit on it."""

from __future__ import annotations

from typing import TypeVar

from torch.optim import Optimizer

__all__ = ["beneath", "unwrapped"]

_Kind = TypeVar("_Kind", bound=Optimizer)

_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")


def unwrapped(optimizer: Optimizer, caller: str) -> Optimizer:
    """The optimizer itself, or the one that accelerate has wrapped.

    Raises:
        TypeError: what accelerate has wrapped is no torch.optim.Optimizer (an engine of DeepSpeed);
            or the wrapper is Lightning's, whose `zero_grad` passes by the one inside.
        ValueError: accelerate accumulates gradients already, and leaves steps out for that.
    """
    kind = type(optimizer)
    package = kind.__module__.split(".")[0]
    if package in _LIGHTNING:
        raise TypeError(
            f"{caller} takes the optimizer that {kind.__module__}.{kind.__name__} has wrapped: "
            "pass its attribute .optimizer"
        )
    if package != "accelerate":
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"{caller} got a {kind.__module__}.{kind.__name__} around a {type(inner).__name__}, "
            "which is no torch.optim.Optimizer"
        )
    steps = getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1)
    if steps > 1:
        raise ValueError(
            f"{caller}: accelerate leaves out the steps between accumulated gradients by itself "
            f"(gradient_accumulation_steps={steps}): leave that away"
        )
    return unwrapped(inner, caller)


def beneath(optimizer: _Kind) -> _Kind:
    """The optimizer itself, or the one in Lightning's wrapper, whose class is a subclass of its.

    Properties of the class find the wrapper in `self`, which has none of the attributes.
    """
    inner = vars(optimizer).get("_optimizer")
    return inner if inner is not None and isinstance(optimizer, type(inner)) else optimizer
