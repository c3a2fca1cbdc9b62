"""The passes that divide gradients by the scale in place, and look for overflows."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import _C
from .._devices import has_kernels_for, ordinal_of
from .._torch.dtensor import any_dtensor, is_dtensor, local_of
from .._torch.modes import is_watched
from .._torch.optim import dtypes_of, increment_version
from ..grads import divide as division
from ..grads.params import params_of
from ..grads.regions import over_ranks, regions_of
from ..grads.shards import LayoutError, reduce_sums

__all__ = ["UnscalingScaler"]

_HOST = torch.device("cpu")


class UnscalingScaler(torch.amp.GradScaler):
    """torch's scaler with gradients unscaled by the C passes, where they are for them."""

    # For code that accumulates: unscale_ divides by the window's count as well.
    divides_in_unscale = True

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale in place, and check them for overflow.

        Accumulated gradients that wait for their division (:func:`faststep.accumulate`) are
        divided in the same pass; with `enabled=False` they are divided too.
        """
        if not self._enabled:
            division.divide(optimizer)
            return
        super().unscale_(optimizer)
        division.settle(optimizer)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        params = params_of(optimizer)
        if not allow_fp16:  # called by unscale_, not by step
            inv_scale = division.unscaled(optimizer, inv_scale)
        if is_watched():
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if any_dtensor(params):
            shards = _unscale_shards(params, inv_scale, found_inf, allow_fp16)
            if shards is not None:
                return shards
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # Only a scale in host memory can be read without waiting for a device.
        if inv_scale.is_cpu and (done := _unscale(params, inv_scale, allow_fp16)) is not None:
            any_grad, overflow = done
            return {_HOST: _flag_on(found_inf, _HOST, overflow)} if any_grad else {}
        grads = _C.collect_grads(params)
        if grads and all(g.is_cuda and has_kernels_for(g) for g in grads):
            found = _unscale_on_devices(grads, inv_scale, found_inf, allow_fp16)
            if found is not None:
                return found
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not allow_fp16 and torch.float16 in dtypes_of(grads):
            raise ValueError("Attempting to unscale FP16 gradients.")
        found_grads = [(p, p.grad) for p in params if p.grad is not None]
        ours = [p for p, grad in found_grads if _C.fusable([grad])]
        foreign = [p for p, grad in found_grads if not _C.fusable([grad])]
        rest = cast(Optimizer, SimpleNamespace(param_groups=[{"params": foreign}]))
        per_device = super()._unscale_grads_(rest, inv_scale, found_inf, allow_fp16)
        if ours:
            _, overflow = cast("tuple[bool, bool]", _unscale(ours, inv_scale, allow_fp16))
            per_device[_HOST] = _flag_on(per_device.get(_HOST, found_inf), _HOST, overflow)
        return per_device


def _unscale_shards(
    params: list[Tensor], inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> dict[torch.device, Tensor] | None:
    """Multiply in place where parameters are DTensors: an overflow on one rank is one on all.

    A flag for each device, none without gradients. Every rank takes part, even without any. None in
    place of all, and nothing is written, if one of the gradients is not for the C passes.
    """
    try:
        reduce_sums(params)
        regions = regions_of(params)
    except LayoutError:
        return None
    grads = _C.collect_grads(params)
    if not allow_fp16 and torch.float16 in dtypes_of(grads):
        raise ValueError("Attempting to unscale FP16 gradients.")
    lists: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        part = local_of(grad) if is_dtensor(grad) else grad
        lists[part.device].append(part)
    if not all(_C.fusable(parts, ordinal_of(parts[0])) for parts in lists.values()):
        return None
    flags, overflow = {}, found_inf.clone()
    for device, parts in lists.items():
        flags[device] = _unscale_parts(parts, inv_scale, found_inf)
        overflow += flags[device].to(overflow.device, non_blocking=True)
    increment_version([grad for grad in grads if is_dtensor(grad)])
    nothing = torch.zeros(len(regions), dtype=torch.float64, device=overflow.device)
    _, found = over_ranks(regions, nothing, overflow)
    return {device: flag.copy_(found.ne(0.0)) for device, flag in flags.items()}


def _unscale_parts(parts: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> Tensor:
    """Multiply tensors of one device in place, and return the flag of this rank there."""
    if parts[0].is_cuda:
        flags = _unscale_on_devices(parts, inv_scale, found_inf, True) or {}
        return next(iter(flags.values()))
    factor = inv_scale.item()
    _, overflow = _C.measure(parts, 1.0)
    if factor != 1.0:
        _C.scale(parts, factor)
        increment_version(parts)
    return _flag_on(found_inf, _HOST, overflow)


def _unscale(params: list[Tensor], inv_scale: Tensor, allow_fp16: bool) -> tuple[bool, bool] | None:
    """Multiply the gradients in place; times 1 nothing is written.

    Returns whether there is a gradient, and whether one was not finite before; None, and nothing is
    written, if one of them is not for the C passes. ValueError for a float16 gradient if they are
    not allowed.
    """
    try:
        found, overflow, written = _C.unscale_grads(params, inv_scale.item(), allow_fp16)
    except TypeError:
        return None
    increment_version(written)
    return found, overflow


def _unscale_on_devices(
    grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> dict[torch.device, Tensor] | None:
    """Multiply in place, one launch per device; a flag for each, set at an overflow there.

    None, and nothing is written, if one of the gradients is not for the C passes.
    """
    lists: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        lists[grad.device].append(grad)
    if len(lists) > 1 and not allow_fp16 and torch.float16 in dtypes_of(grads):
        raise ValueError("Attempting to unscale FP16 gradients.")  # before any list is written
    if len(lists) > 1 and not all(_C.fusable(some, ordinal_of(some[0])) for some in lists.values()):
        return None
    flags = {}
    for device, some in lists.items():
        flag = flags[device] = found_inf.to(device=device, copy=True, non_blocking=True)
        scale = inv_scale.to(device=device, non_blocking=True)
        try:
            _C.device_unscale(some, scale, flag, allow_fp16)
        except TypeError:
            return None  # the only list, then
        increment_version(some)
    return flags


def _flag_on(found_inf: Tensor, device: torch.device, overflow: bool) -> Tensor:
    """A copy of `found_inf` on `device`, set to 1 at an overflow."""
    copy = found_inf.to(device=device, copy=True)
    return copy.fill_(1.0) if overflow else copy
