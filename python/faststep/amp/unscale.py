"""The passes that divide gradients by the scale in place, and look for overflows."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from .. import _C
from .._devices import ordinal_of
from .._torch.optim import dtypes_of, increment_version

__all__ = ["flag_on", "unscale", "unscale_on_devices"]


def unscale(params: list[Tensor], inv_scale: Tensor, allow_fp16: bool) -> tuple[bool, bool] | None:
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


def unscale_on_devices(
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


def flag_on(found_inf: Tensor, device: torch.device, overflow: bool) -> Tensor:
    """A copy of `found_inf` on `device`, set to 1 at an overflow."""
    copy = found_inf.to(device=device, copy=True)
    return copy.fill_(1.0) if overflow else copy
