"""A look at parameters in 16 bits before the first step: whether updates change them at all."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .._torch.dtensor import part_of
from .._torch.tensors import has_no_memory
from ..grads.params import described
from .request import Steppable, formula

_BY_SIZE = {formula(rule).number for rule in ("adam", "amsgrad", "adamax", "nadam", "lion")}
_LOOKED_AT = 4096  # elements of a parameter, about
_RATES = ("lr", "initial_lr", "max_lr")  # schedulers that begin below the rate leave it here


def warn_of_lost_updates(optimizer: Steppable) -> None:
    """Warn of the first parameter in CPU memory most of whose elements updates leave as they are.

    Without a master a bf16 or fp16 element stays where the update is less than half the distance to
    the next number. It is about `lr` in classes that divide it by its size, or take its sign.
    """
    if optimizer._keeps_masters or optimizer._made_from is not None:
        return
    for number, group in enumerate(optimizer.param_groups):
        if optimizer._formula_of(group).number not in _BY_SIZE:
            return
        rates = [float(group[key]) for key in _RATES if isinstance(group.get(key), (int, float))]
        for index, param in enumerate(group["params"] if rates else ()):
            if _is_lost(param, max(rates)):
                where = described(optimizer, number, index)
                warnings.warn(
                    f"{type(optimizer).__name__}: updates of about lr = {max(rates):g} are lost in "
                    f"most elements of {where}, whose numbers are further apart: "
                    'master_weights=True or "remainder16" keeps them, or a larger lr',
                    stacklevel=6,
                )
                return


def _is_lost(param: Tensor, lr: float) -> bool:
    is_narrow = param.dtype in (torch.bfloat16, torch.float16)
    if not is_narrow or param.grad is None or param.device.type != "cpu" or lr <= 0:
        return False
    if has_no_memory(param):
        return False
    flat = part_of(param.detach()).reshape(-1)
    some = flat[:: max(1, flat.numel() // _LOOKED_AT)]
    wide = some.float()
    nearer = wide - torch.full_like(wide, lr).copysign(wide)  # to 0: numbers are closer there
    stays = nearer.to(some.dtype) == some
    return 2 * int(stays.sum()) > stays.numel()
