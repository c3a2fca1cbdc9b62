"""Parameters and gradients that are DTensors: of each, a rank has a part.

fully_shard, tensor parallelism and `distribute_tensor` make such parameters. What faststep does
with a gradient element by element it does with the part, once the gradient is divided as its
parameter is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.dtensor import is_dtensor, local_of, replicate, set_local, spec_of

# States that are not divided: the step count and the 0-d states of NAdam and ASGD, of which ranks
# have the same, and the scales of this rank's codes.
_UNDIVIDED = frozenset({"step", "mu_product", "eta", "mu", "state_scales"})


class LayoutError(TypeError):
    """A parameter or its gradient is divided in a way that cannot be used: (role, kind, detail)."""


def align(param: Tensor) -> tuple[Any, Any] | None:
    """Divide the gradient as the parameter is, and return the specs of both.

    None without a gradient, and where neither is a DTensor.

    A `Partial` gradient is reduced over the ranks, and another one is redistributed, as torch's
    operators do. It then takes the place of the one before in `.grad`.

    Raises:
        LayoutError: only one of the two is a DTensor, the meshes differ, or the parameter is
            `Partial`.
    """
    grad = param.grad
    if grad is None:
        return None
    aligned = _aligned(param, grad, "gradient")
    if not is_dtensor(param):
        return None
    if aligned is not grad:
        param.grad = aligned
        aligned = param.grad
    return spec_of(param), spec_of(aligned)


def align_states(param: Tensor, state: dict[str, Any], keys: Sequence[str]) -> tuple[Any, ...]:
    """Divide the states of these names as the parameter is, and return the spec of each.

    A state with other placements is redistributed, and replaced in `state`. The spec is None for
    a state that is missing, and for one that is not divided.

    Raises:
        LayoutError: only one of the state and the parameter is a DTensor, or the meshes differ.
    """
    specs: list[Any] = []
    for key in keys:
        value = state.get(key)
        if value is None or key in _UNDIVIDED:
            specs.append(None)
            continue
        aligned = _aligned(param, value, f"state '{key}'")
        if aligned is not value:
            state[key] = aligned
        specs.append(spec_of(aligned) if is_dtensor(aligned) else None)
    return tuple(specs)


def _aligned(param: Tensor, tensor: Tensor, role: str) -> Tensor:
    """The tensor itself, or divided as the parameter is. LayoutError where that cannot be."""
    if is_dtensor(tensor) != is_dtensor(param):
        kinds = type(tensor).__name__, type(param).__name__
        raise LayoutError(role, "type", "is a {}, but its parameter is a {}".format(*kinds))
    if not is_dtensor(param):
        return tensor
    here, there = spec_of(param), spec_of(tensor)
    if any(placement.is_partial() for placement in here.placements):
        raise LayoutError("parameter", "placement", f"has the placements {here.placements}")
    if here.mesh != there.mesh:
        what = f"is on {there.mesh}, but its parameter is on {here.mesh}"
        raise LayoutError(role, "placement", what)
    if here.placements == there.placements:
        return tensor
    with torch.no_grad():
        divided: Any = tensor
        made: Tensor = divided.redistribute(here.mesh, here.placements)
    return made


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


def align_all(parameters: Iterable[Tensor]) -> None:
    """Divide all gradients as their parameters are: see `align`.

    That of a plain parameter may be a DTensor here; sums that wait are reduced.

    Raises:
        LayoutError: see `align`.
    """
    for param in parameters:
        grad = param.grad
        if grad is None or not is_dtensor(grad):
            continue
        if not is_dtensor(param):
            param.grad = summed(grad)
        elif not _is_alike(spec_of(param), spec_of(grad)):
            align(param)


def is_divided_as(tensor: Tensor, param: Tensor) -> bool:
    """True if a gradient or a state is divided as its parameter is, or both are no DTensors."""
    if not is_dtensor(tensor) or not is_dtensor(param):
        return is_dtensor(tensor) == is_dtensor(param)
    return _is_alike(spec_of(param), spec_of(tensor))


def _is_alike(one: Any, other: Any) -> bool:
    """True if two specs are sure to divide in the same way; most are the same object's."""
    same = one is other or (one.mesh == other.mesh and one.placements == other.placements)
    return same and not any(placement.is_partial() for placement in one.placements)


def _has_sums(tensor: Tensor) -> bool:
    return any(placement.is_partial() for placement in spec_of(tensor).placements)


def wait_for(tensor: Tensor) -> bool:
    """Wait for the part of a DTensor that is still on its way; False if there is none."""
    local: Any = local_of(tensor) if is_dtensor(tensor) else None
    if not hasattr(local, "wait"):
        return False
    set_local(tensor, local.wait())
    return True
