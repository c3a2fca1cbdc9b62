"""Norm and clipping of gradients that are DTensors: passes over the parts, one small collective.

Raises TypeError, before anything is written, where torch's own functions have to do it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C
from .._devices import has_kernels_for
from .._torch.dtensor import full_tensor, is_dtensor, local_of, replicated
from .._torch.optim import increment_version
from .regions import over_ranks, regions_of
from .shards import reduce_sums, summed
from .total import NONFINITE, promoted

__all__ = ["clamp_shards", "clip_shards", "norm_of_shards", "scale_shards"]


def _parts_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts; TypeError if they cannot be used."""
    parts = [local_of(one) if is_dtensor(one) else one for one in tensors]
    device = parts[0].device if parts else torch.device("cpu")
    usable = device.type == "cpu" or (device.type == "cuda" and has_kernels_for(parts[0]))
    if not usable or any(part.device != device for part in parts):
        raise TypeError("the parts lie on several devices, or on one without kernels")
    return parts


def _norm_of_all(tensors: Sequence[Tensor], norm_type: float) -> tuple[Tensor, int]:
    """The norm of all tensors, 0-d float64 on their device, and their dtypes as bits."""
    if not norm_type > 0.0:  # a count, or a smallest element
        raise TypeError("only norms of an order above 0 can be added up")
    tensors = [summed(one) for one in tensors]
    parts = _parts_of(tensors)
    regions = regions_of(tensors)
    norms, dtypes = [], 0
    for region in regions:
        some = [parts[place] for place in region.places]
        norm, found = _norm(some, norm_type)
        norms.append(norm)
        dtypes |= found
    values = torch.stack(norms)
    undefined = values.isnan().any()
    if math.isinf(norm_type):
        comparable = torch.where(values.isnan(), 0.0, values)
        values, found_nan = over_ranks(regions, comparable, undefined, largest=True)
        norm = torch.where(found_nan != 0.0, math.nan, values.max())
    else:
        powers, _ = over_ranks(regions, values.pow(norm_type), undefined)
        norm = powers.sum().pow(1.0 / norm_type)
    return norm, dtypes


def _norm(parts: list[Tensor], norm_type: float) -> tuple[Tensor, int]:
    if parts[0].is_cuda:
        wide = torch.empty((), dtype=torch.float64, device=parts[0].device)
        return wide, _C.device_norm(parts, norm_type, wide)
    norm, dtypes = _C.norm(parts, norm_type)
    return torch.tensor(norm, dtype=torch.float64, device="cpu"), dtypes


def norm_of_shards(
    tensors: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool
) -> tuple[Tensor, Tensor]:
    """The norm of all ranks' parts: in float64, and as torch returns it.

    Of DTensors torch returns a DTensor. This one is whole on all ranks, so that `full_tensor()` and
    `item()` communicate no more.
    """
    norm, dtypes = _norm_of_all(tensors, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(NONFINITE.format(norm_type))
    returned = norm.to(promoted(dtypes))
    return norm, replicated(returned, tensors[0]) if is_dtensor(tensors[0]) else returned


def clip_shards(
    parameters: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """Clip the gradients of parameters, and return their norm."""
    reduce_sums(parameters)
    grads = _C.collect_grads(parameters)
    norm, returned = norm_of_shards(grads, norm_type, error_if_nonfinite)
    scale_shards(grads, max_norm, norm)
    return returned


def scale_shards(tensors: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Multiply by min(1, max_norm / (norm + 1e-6)); a norm of NaN makes all NaN."""
    parts = _parts_of(tensors)
    norm = full_tensor(norm)
    if parts and parts[0].is_cuda:
        _C.device_clip(parts, max_norm, norm.to(parts[0].device))
    elif parts:
        denominator = norm.item() + 1e-6
        coefficient = max_norm / denominator if denominator else max_norm * math.inf
        if coefficient >= 1.0:
            return
        _C.scale(parts, coefficient)
    _moved(tensors, parts)


def clamp_shards(parameters: Sequence[Tensor], limit: float) -> None:
    """Clamp every element of the gradients to [-limit, limit]."""
    reduce_sums(parameters)
    grads = _C.collect_grads(parameters)
    parts = _parts_of(grads)
    (_C.device_clamp if parts[0].is_cuda else _C.clamp)(parts, limit)
    _moved(grads, parts)


def _moved(tensors: Sequence[Tensor], parts: list[Tensor]) -> None:
    """Move the version counters of DTensors and of their parts."""
    increment_version(parts)
    increment_version([one for one in tensors if is_dtensor(one)])
