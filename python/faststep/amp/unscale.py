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
from .._torch.dtensor import any_dtensor, is_dtensor, part_of
from .._torch.modes import is_watched
from .._torch.optim import dtypes_of, increment_version, replaces_unscaling
from ..grads import divide as division
from ..grads.agreement import over_ranks
from ..grads.dtensors import LayoutError, align_all
from ..grads.params import params_of
from ..grads.regions import regions_of

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
        if is_watched() or replaces_unscaling():
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

    A flag for each device; none if no rank has gradients. Every rank takes part, even without any.
    None in place of all, and nothing is written, if gradients are not for the C passes.
    """
    try:
        regions = regions_of(params)
    except LayoutError:
        return None
    failure = None
    lists: dict[torch.device, list[Tensor]] = {}
    flags: dict[torch.device, Tensor] = {}
    try:
        lists = _parts_by_device(params, allow_fp16)
        for device, parts in lists.items():
            if device.type == "cuda":  # multiplies as well
                flags |= _unscale_on_devices(parts, inv_scale, found_inf, True) or {}
            else:
                flags[device] = _flag_on(found_inf, _HOST, _C.measure(parts, 1.0)[1])
    except (TypeError, ValueError) as error:
        failure = error
    overflow = found_inf.clone()
    for flag in flags.values():
        overflow += flag.to(overflow.device, non_blocking=True)
    agreed = over_ranks(
        regions,
        torch.zeros(len(regions), dtype=torch.float64, device=overflow.device),
        overflow,
        has_grads=bool(lists),
        failure=None if failure is None else f"unscale_: {failure}; no gradient was changed",
    )
    if isinstance(failure, ValueError):
        raise failure
    if failure is not None and agreed.fails_alone:
        raise RuntimeError(f"unscale_: {failure}; no gradient was changed")
    if failure is not None:
        return None
    for parts in lists.values():
        if not parts[0].is_cuda and (factor := inv_scale.item()) != 1.0:
            _C.scale(parts, factor)
            increment_version(parts)
    increment_version([p.grad for p in params if p.grad is not None and is_dtensor(p.grad)])
    if not flags and bool(agreed.grads):  # of the other ranks
        flags[part_of(params[0]).device] = found_inf
    return {
        device: agreed.found.ne(0.0).to(device=device, dtype=torch.float32, non_blocking=True)
        for device in flags
    }


def _parts_by_device(params: list[Tensor], allow_fp16: bool) -> dict[torch.device, list[Tensor]]:
    """The parts of the gradients by their device.

    Raises:
        LayoutError: see `align_all`.
        TypeError: one of them is not for the C passes.
        ValueError: one of them is float16, which is not allowed.
    """
    align_all(params)
    lists: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for at, param in enumerate(params):
        grad = param.grad
        if grad is None:
            continue
        part = part_of(grad)
        if not allow_fp16 and part.dtype is torch.float16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        if not _C.fusable([part], ordinal_of(part)):
            shape = tuple(grad.shape)
            raise TypeError(
                f"the gradient of parameter {at} (shape {shape}, {grad.dtype}, {grad.layout}) "
                "cannot be used beside DTensors"
            )
        lists[part.device].append(part)
    return lists


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
