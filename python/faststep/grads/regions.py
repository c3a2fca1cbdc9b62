"""Over which process groups tensors are divided.

Tensors that are divided over the same groups form a region. A part is measured on its rank, the
measurements of a region are added, and the sums are added over the groups (agreement.py). A tensor
that is replicated over a group counts once there, and so does a plain one, which is taken to be the
same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from .._torch.dtensor import is_dtensor, spec_of
from .._torch.fsdp import group_of_shard, is_fsdp_shard
from .._torch.ranks import world_size
from .dtensors import LayoutError

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
        return _groups_of_shard(tensor) if is_fsdp_shard(tensor) else ()
    spec = spec_of(tensor)
    key = id(spec.mesh), spec.placements
    known = _layouts.get(key)
    if known is None:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        known = _layouts[key] = spec.mesh, _groups_of(spec)
    return known[1]


def _groups_of_shard(param: Tensor) -> tuple[Any, ...]:
    """Those of a part in FSDP1."""
    try:
        group = group_of_shard(param)
    except KeyError:
        what = "is of a FullyShardedDataParallel model that is gone"
        raise LayoutError("parameter", "placement", what) from None
    return () if group is None or world_size(group) == 1 else (group,)


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
