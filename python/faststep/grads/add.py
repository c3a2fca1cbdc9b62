"""Sums of tensors of any two dtypes, in one kernel where there is one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._devices import has_kernels_for
from .._torch.dtensor import is_dtensor, part_of
from .._torch.modes import is_watched
from .._torch.optim import increment_version

__all__ = ["Addition", "add_all", "add_to"]


class Addition(NamedTuple):
    """total += factor * term, then += factor * more; `start` ignores the total before."""

    total: Tensor
    term: Tensor
    more: Tensor | None
    factor: float
    start: bool


def add_to(total: Tensor, term: Tensor, factor: float, start: bool) -> None:
    """One addition, in one kernel."""
    _add_alike([Addition(total, term, None, factor, start)])


def add_all(additions: Iterable[Addition]) -> None:
    """Many additions: those that are alike share a kernel."""
    alike: dict[tuple[Any, ...], list[Addition]] = {}
    for one in additions:
        key = (one.total.device, one.more is None, one.factor, one.start)
        alike.setdefault(key, []).append(one)
    for these in alike.values():
        _add_alike(these)


def _add_alike(additions: list[Addition]) -> None:
    """Additions of the same device, number of terms, factor and `start`, in one kernel."""
    if is_watched():
        _add_by_torch(additions)
        return
    # Those of DTensors are divided alike: their parts are added.
    totals = [part_of(one.total) for one in additions]
    terms = [part_of(one.term) for one in additions]
    more = [part_of(one.more) for one in additions if one.more is not None]
    on_device = totals[0].is_cuda and has_kernels_for(totals[0])
    add = _C.device_accumulate if on_device else _C.accumulate
    try:
        add(totals, terms, additions[0].factor, additions[0].start, more or None)
    except TypeError:  # on a device without our kernels, or a layout that they do not know
        _add_by_torch(additions)
    else:
        increment_version(totals)
        increment_version([one.total for one in additions if is_dtensor(one.total)])


def _add_by_torch(additions: Iterable[Addition]) -> None:
    with torch.no_grad():
        for total, term, more, factor, start in additions:
            if start:
                total.copy_(term).mul_(factor)
            else:
                total.add_(term, alpha=factor)
            if more is not None:
                total.add_(more, alpha=factor)
