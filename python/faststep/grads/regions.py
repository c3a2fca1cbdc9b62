"""Over which process groups tensors are divided, and sums of what their parts hold.

Tensors that are divided over the same groups form a region. A part is measured on its rank, the
measurements of a region are added, and the sums are added over the groups: one small collective per
group, whatever the number of tensors. A tensor that is replicated over a group counts once there,
and so does a plain one, which is taken to be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch.dtensor import devices_of_group, is_dtensor, spec_of
from .shards import LayoutError

__all__ = ["Region", "groups_of", "over_ranks", "regions_of"]

_MOST_LAYOUTS = 256  # that are kept


class Region(NamedTuple):
    """Some of the tensors, by their places, which are divided over the same process groups."""

    groups: tuple[Any, ...]
    places: list[int]


# By the identity of the mesh, which is kept: an equal one may have other process groups.
_layouts: dict[tuple[int, Any], tuple[Any, tuple[Any, ...]]] = {}


def groups_of(tensor: Tensor) -> tuple[Any, ...]:
    """The process groups that a tensor is divided over.

    Raises:
        LayoutError: this rank has no part in the mesh.
    """
    if not is_dtensor(tensor):
        return ()
    spec = spec_of(tensor)
    key = id(spec.mesh), spec.placements
    known = _layouts.get(key)
    if known is None:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        known = _layouts[key] = spec.mesh, _groups_of(spec)
    return known[1]


def _groups_of(spec: Any) -> tuple[Any, ...]:
    mesh = spec.mesh
    if mesh.get_coordinate() is None:
        raise LayoutError("parameter", "placement", f"is on {mesh}, of which this rank is no part")
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(spec.placements)
        if mesh.size(dim) > 1 and not placement.is_replicate()
    )


def regions_of(tensors: Iterable[Tensor]) -> list[Region]:
    """The regions of tensors, in the order in which they first occur, the same on all ranks."""
    found: dict[tuple[Any, ...], Region] = {}
    for place, tensor in enumerate(tensors):
        groups = groups_of(tensor)
        region = found.get(groups)
        if region is None:
            region = found[groups] = Region(groups, [])
        region.places.append(place)
    return list(found.values())


def over_ranks(
    regions: Sequence[Region], values: Tensor, flag: Tensor, *, largest: bool = False
) -> tuple[Tensor, Tensor]:
    """Add one value per region over the region's process groups; or take the largest.

    Every rank that has a part in one of the groups must call this, with or without gradients.
    Nothing waits for a CUDA device.

    Args:
        values: 1-d float64, one of each region.
        flag: 0-d; not 0 where something was found on this rank.
        largest: take the largest value; there must be no NaN then. Default: False.

    Returns:
        The values, and a flag, 0-d float64: above 0 if one of the ranks has found something.
    """
    table = torch.cat([values, flag.to(values).ne(0.0).to(values).reshape(1)])
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    for group in dict.fromkeys(group for region in regions for group in region.groups):
        rows = [row for row, region in enumerate(regions) if group in region.groups]
        if len(rows) == len(regions):
            table = _reduced(table, group, operation)
        else:
            at = torch.tensor([*rows, len(regions)], device=table.device)
            table[at] = _reduced(table[at], group, operation)
    return table[:-1], table[-1]


def _reduced(table: Tensor, group: Any, operation: Any) -> Tensor:
    """The sum over a process group, which may not send tensors of the table's device."""
    devices = devices_of_group(group)
    sent = table if table.device.type in devices else table.to(devices[0])
    dist.all_reduce(sent, operation, group=group)
    return sent.to(table.device)
