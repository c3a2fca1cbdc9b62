"""Norm and clipping of gradients that are DTensors: passes over the parts, one small collective.

Raises TypeError, before anything is written, where torch's own functions have to do it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C
from .._devices import has_kernels_for
from .._torch.dtensor import full_tensor, is_dtensor, part_of, replicated
from .._torch.optim import increment_version
from .agreement import Agreed, over_ranks
from .dtensors import LayoutError, align_all, summed
from .regions import Region, regions_of
from .total import promoted, returned


def _parts_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts; TypeError if they cannot be used."""
    parts = [part_of(one) for one in tensors]
    device = parts[0].device if parts else torch.device("cpu")
    usable = device.type == "cpu" or (device.type == "cuda" and has_kernels_for(parts[0]))
    if not usable or any(part.device != device for part in parts):
        raise TypeError("the parts lie on several devices, or on one without kernels")
    return parts


def _norm_of_all(
    owners: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    norm_type: float,
    failure: Exception | None = None,
) -> tuple[Tensor, int, Agreed]:
    """The norm of all tensors, 0-d float64 on their device, and their dtypes as bits.

    Args:
        owners: of the tensors. They are divided alike, and are there on every rank.
        tensors: None where this rank has none.
        norm_type: order of the norm.
        failure: what has failed on this rank already.
    """
    regions = regions_of(owners)
    values = torch.full((len(regions),), math.nan, dtype=torch.float64)
    dtypes = 0
    try:
        if failure is None:
            values, dtypes = _norms_of(regions, tensors, norm_type)
    except Exception as error:
        failure = error
    values = values.to(part_of(owners[0]).device)
    undefined = values.isnan().any()
    infinite = math.isinf(norm_type)
    values = torch.where(values.isnan(), 0.0, values) if infinite else values.pow(norm_type)
    agreed = over_ranks(
        regions,
        values,
        undefined,
        has_grads=any(one is not None for one in tensors),
        failure=None if failure is None else _text_of(failure, tensors),
        largest=infinite,
    )
    if failure is not None:
        alone = agreed.fails_alone and isinstance(failure, TypeError)  # else torch does it
        raise RuntimeError(_text_of(failure, tensors)) if alone else failure
    if infinite:
        return torch.where(agreed.found != 0.0, math.nan, agreed.values.max()), dtypes, agreed
    return agreed.values.sum().pow(1.0 / norm_type), dtypes, agreed


def _norms_of(
    regions: Sequence[Region], tensors: Sequence[Tensor | None], norm_type: float
) -> tuple[Tensor, int]:
    """The norm of this rank's parts in each region, and their dtypes as bits."""
    parts = iter(_parts_of([one for one in tensors if one is not None]))
    by_place = [None if one is None else next(parts) for one in tensors]
    norms, dtypes = [], 0
    for region in regions:
        some = [part for place in region.places if (part := by_place[place]) is not None]
        norm, found = _norm(some, norm_type)
        norms.append(norm)
        dtypes |= found
    device = next((norm.device for norm in norms if norm.is_cuda), None)
    return torch.stack([norm.to(device) for norm in norms]), dtypes


def _norm(parts: list[Tensor], norm_type: float) -> tuple[Tensor, int]:
    if parts and parts[0].is_cuda:
        wide = torch.empty((), dtype=torch.float64, device=parts[0].device)
        return wide, _C.device_norm(parts, norm_type, wide)
    norm, dtypes = _C.norm(parts, norm_type)
    return torch.tensor(norm, dtype=torch.float64, device="cpu"), dtypes


def _text_of(failure: Exception, tensors: Sequence[Tensor | None]) -> str:
    """The error, with the place of the first gradient that cannot be used."""
    for place, one in enumerate(tensors):
        if one is not None and not _C.fusable([part_of(one)]):
            shape = tuple(one.shape)
            what = f"the gradient at {place} of the list (shape {shape}, {one.dtype}, {one.layout})"
            return f"{what} cannot be used beside DTensors: {failure}; nothing was changed"
    return f"{failure}; nothing was changed"


def norm_of_shards(tensors: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """The norm of all ranks' parts of gradients, as torch returns it.

    Of DTensors torch returns a DTensor. This one is whole on all ranks, so that `full_tensor()` and
    `item()` communicate no more.
    """
    _check_order(norm_type)
    tensors = [summed(one) for one in tensors]
    norm, dtypes, _ = _norm_of_all(tensors, tensors, norm_type)
    norm = returned(norm, promoted(dtypes), norm_type, error_if_nonfinite)
    return replicated(norm, tensors[0]) if is_dtensor(tensors[0]) else norm


def _check_order(norm_type: float) -> None:
    if not norm_type > 0.0:  # a count, or a smallest element
        raise TypeError("only norms of an order above 0 can be added up")


def clip_shards(
    parameters: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """Clip the gradients of parameters, and return their norm.

    A rank without gradients takes part, and has the norm of the others.
    """
    _check_order(norm_type)
    failure = None
    try:
        align_all(parameters)
    except LayoutError as error:
        failure = error
    grads = [param.grad for param in parameters]
    owners = [
        param if grad is None or is_dtensor(param) else grad
        for param, grad in zip(parameters, grads, strict=True)
    ]
    norm, dtypes, agreed = _norm_of_all(owners, grads, norm_type, failure)
    mine = [grad for grad in grads if grad is not None]
    if not mine and not bool(agreed.grads):
        return torch.tensor(0.0)
    if mine:
        dtype, like = promoted(dtypes), mine[0]
    else:
        dtypes_here = [param.dtype for param in parameters]
        dtype, like = functools.reduce(torch.promote_types, dtypes_here), owners[0]
    rounded = returned(norm, dtype, norm_type, error_if_nonfinite)
    scale_shards(mine, max_norm, norm)
    return replicated(rounded, like) if is_dtensor(like) else rounded


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
    align_all(parameters)
    grads = _C.collect_grads(parameters)
    parts = _parts_of(grads)
    (_C.device_clamp if parts[0].is_cuda else _C.clamp)(parts, limit)
    _moved(grads, parts)


def _moved(tensors: Sequence[Tensor], parts: list[Tensor]) -> None:
    """Move the version counters of DTensors and of their parts."""
    increment_version(parts)
    increment_version([one for one in tensors if is_dtensor(one)])
