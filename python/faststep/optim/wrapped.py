"""Takes the optimizer out of a framework's wrapper, because hooks must sit on it."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

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


class PassesOn:
    """An optimizer whose attributes Lightning's wrappers pass on.

    Such a wrapper's class is made of its own and the optimizer's. Class attributes and properties
    would so find the wrapper in `self`, which has none of the optimizer's attributes. Here they are
    replaced in that class, and cost nothing in others.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if any(base.__module__.split(".")[0] in _LIGHTNING for base in cls.__bases__):
            for name in _ours(cls):
                setattr(cls, name, _passed_on(name))


def _ours(kind: type) -> set[str]:
    """The properties of faststep's classes, without those that a class has hidden."""
    ours = [base for base in kind.__mro__ if base.__module__.split(".")[0] == "faststep"]
    names = {name for base in ours for name in vars(base)}
    return {n for n in names if isinstance(inspect.getattr_static(kind, n), property)}


def _passed_on(name: str) -> property:
    def get(wrapper: Any) -> Any:
        return getattr(wrapper._optimizer, name)

    def put(wrapper: Any, value: Any) -> None:
        setattr(wrapper._optimizer, name, value)

    return property(get, put)
