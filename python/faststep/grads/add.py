"""Sums of tensors of any two dtypes, in one kernel where there is one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._devices import has_kernels_for
from .._torch.dtensor import any_dtensor, is_dtensor, part_of
from .._torch.modes import is_watched
from .._torch.optim import increment_version


class Addition(NamedTuple):
    """total += factor * term, then += factor * more; `start` ignores the total before."""

    total: Tensor
    term: Tensor
    more: Tensor | None
    factor: float
    start: bool


def add_all(additions: Iterable[Addition]) -> None:
    """Many additions: those that are alike share a kernel."""
    alike: dict[tuple[Any, ...], list[Addition]] = {}
    for one in additions:
        key = (one.total.device, one.more is None, one.factor, one.start)
        alike.setdefault(key, []).append(one)
    for these in alike.values():
        add_alike(these)


def add_alike(additions: list[Addition]) -> None:
    """Additions of the same device, number of terms, factor and `start`, in one kernel."""
    if is_watched():
        _add_by_torch(additions)
        return
    totals, terms, more, factors, starts = zip(*additions, strict=True)
    written = totals
    if any_dtensor(totals):  # their terms are divided alike: the parts are added
        totals, terms, more = (tuple(map(part_of, these)) for these in (totals, terms, more))
        written = (*totals, *filter(is_dtensor, written))
    on_device = totals[0].is_cuda and has_kernels_for(totals[0])
    add = _C.device_accumulate if on_device else _C.accumulate
    try:
        add(totals, terms, factors[0], starts[0], None if more[0] is None else more)
    except TypeError:  # on a device without our kernels, or a layout that they do not know
        _add_by_torch(additions)
    else:
        increment_version(written)


def _add_by_torch(additions: Iterable[Addition]) -> None:
    with torch.no_grad():
        for total, term, more, factor, start in additions:
            if start:
                total.copy_(term).mul_(factor)
            else:
                total.add_(term, alpha=factor)
            if more is not None:
                total.add_(more, alpha=factor)
