"""Parameters and gradients that are DTensors: of each, a rank has a part.

fully_shard, tensor parallelism and `distribute_tensor` make such parameters. What faststep does
with a gradient element by element it does with the part, once the gradient is divided as its
parameter is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._torch.dtensor import (
    is_dtensor,
    local_of,
    replicate,
    set_local,
    spec_of,
)

__all__ = ["LayoutError", "align", "reduce_sums", "summed", "wait_for"]


class LayoutError(TypeError):
    """A parameter or its gradient is divided in a way that cannot be used: (role, kind, detail)."""


def align(param: Tensor) -> tuple[Any, Any] | None:
    """Divide the gradient as the parameter is, and return the specs of both; None without one.

    A `Partial` gradient is reduced over the ranks, and another one is redistributed, as torch's
    operators do. It then takes the place of the one before in `.grad`.

    Raises:
        LayoutError: the gradient is no DTensor or has another mesh, or the parameter is `Partial`.
    """
    grad = param.grad
    if grad is None:
        return None
    if not is_dtensor(grad):
        what = f"is a {type(grad).__name__}, but its parameter is a DTensor"
        raise LayoutError("gradient", "type", what)
    here, there = spec_of(param), spec_of(grad)
    if any(placement.is_partial() for placement in here.placements):
        raise LayoutError("parameter", "placement", f"has the placements {here.placements}")
    if here.mesh != there.mesh:
        what = f"is on {there.mesh}, but its parameter is on {here.mesh}"
        raise LayoutError("gradient", "placement", what)
    if here.placements != there.placements:
        with torch.no_grad():
            divided: Any = grad
            param.grad = divided.redistribute(here.mesh, here.placements)
        there = spec_of(param.grad)
    return here, there


def summed(tensor: Tensor) -> Tensor:
    """The tensor itself, or with its `Partial` placements reduced over the ranks."""
    if not is_dtensor(tensor) or not _has_sums(tensor):
        return tensor
    whole: Any = tensor
    placements = spec_of(tensor).placements
    kept = [replicate() if one.is_partial() else one for one in placements]
    with torch.no_grad():
        made: Tensor = whole.redistribute(placements=kept)
    return made


def reduce_sums(parameters: Iterable[Tensor]) -> None:
    """Reduce gradients that are sums which wait to be added over the ranks, in `.grad`.

    Raises:
        LayoutError: see `align`.
    """
    for param in parameters:
        grad = param.grad
        if grad is not None and is_dtensor(grad) and _has_sums(grad):
            if is_dtensor(param):
                align(param)
            else:
                param.grad = summed(grad)


def _has_sums(tensor: Tensor) -> bool:
    return any(placement.is_partial() for placement in spec_of(tensor).placements)


def wait_for(tensor: Tensor) -> bool:
    """Wait for the part of a DTensor that is still on its way; False if there is none."""
    local: Any = local_of(tensor) if is_dtensor(tensor) else None
    if not hasattr(local, "wait"):
        return False
    set_local(tensor, local.wait())
    return True
