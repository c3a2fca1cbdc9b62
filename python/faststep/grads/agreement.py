"""Messages of the ranks before gradients are written: one small collective per group.

Every rank that has a part in a process group takes part, with gradients or without, and also if it
fails: then the others raise too, instead of waiting for it until the group's timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch.dtensor import devices_of_group
from .regions import Region

_FOUND, _GRADS, _FAILED, _WORKED = range(-4, 0)  # the last entries of what is sent


class Agreed(NamedTuple):
    """The findings of all ranks."""

    values: Tensor  # 1-d float64, one of each region
    found: Tensor  # 0-d float64, above 0 if a rank has found something, or has failed
    grads: Tensor  # 0-d float64, above 0 if a rank has a gradient
    fails_alone: bool  # this rank has failed, and another one has not


def over_ranks(
    regions: Sequence[Region],
    values: Tensor,
    found: Tensor,
    *,
    has_grads: bool,
    failure: str | None = None,
    largest: bool = False,
) -> Agreed:
    """Add one value per region over the region's process groups; or take the largest.

    Every rank that has a part in one of the groups must call this. Nothing waits for a CUDA device,
    unless this rank has failed. The others cannot see that without waiting, so they go on there,
    with a flag that makes a step skip.

    Args:
        values: 1-d float64, one of each region.
        found: 0-d; not 0 where something was found on this rank.
        has_grads: True if this rank has a gradient.
        failure: what keeps this rank from going on. It raises by itself, after this call.
        largest: take the largest value; there must be no NaN then. Default: False.

    Raises:
        RuntimeError: others have failed; it says which ranks, and why.
    """
    facts = (float(has_grads), float(failure is not None), float(failure is None))
    flags = [found.to(values).ne(0.0).to(values).reshape(1)]
    table = torch.cat([values, *flags, *(values.new_full((1,), fact) for fact in facts)])
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    split = []  # the groups in which some ranks have failed, and others have not
    for group in dict.fromkeys(group for region in regions for group in region.groups):
        rows = [row for row, region in enumerate(regions) if group in region.groups]
        if len(rows) == len(regions):
            table = _reduced(table, group, operation)
        else:
            tail = range(len(regions), len(table))
            at = torch.tensor([*rows, *tail], device=table.device)
            table[at] = _reduced(table[at], group, operation)
        if table.is_cpu and 0.0 not in table[_FAILED:].tolist():
            split.append(group)
    if split:
        texts = _gathered(split, failure)
        if failure is None:
            raise RuntimeError("; ".join(f"rank {rank}: {texts[rank]}" for rank in sorted(texts)))
    fails_alone = failure is not None and bool(table[_WORKED] != 0.0)
    count = len(regions)
    return Agreed(table[:count], table[_FOUND] + table[_FAILED], table[_GRADS], fails_alone)


def _reduced(table: Tensor, group: Any, operation: Any) -> Tensor:
    """The sum over a process group, which may not send tensors of the table's device."""
    devices = devices_of_group(group)
    sent = table if table.device.type in devices else table.to(devices[0])
    dist.all_reduce(sent, operation, group=group)
    return sent.to(table.device)


def _gathered(groups: Sequence[Any], failure: str | None) -> dict[int, str]:
    """The errors by rank. Each group passes on what its ranks have heard in those before."""
    texts = {} if failure is None else {dist.get_rank(): failure}
    for group in groups:
        heard: list[dict[int, str]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(heard, texts, group=group)
        for other in heard:
            texts.update(other)
    return texts
