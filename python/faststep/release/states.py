"""States of parameters that are updated in backward, made before the first backward."""

from __future__ import annotations

import torch

from .. import _C
from ..optim.base import FusedOptimizer

__all__ = ["make_state"]


def make_state(optimizer: FusedOptimizer, group: int, index: int) -> None:
    """Make the state before the first backward, where zeros are as good as no state.

    States made in backward would lie between gradients, and what is freed there is too small for
    the next gradient: malloc would keep most of what release saves.
    """
    entry = optimizer.param_groups[group]
    param = entry["params"][index]
    keys = optimizer._checked_rule_of(entry).state_keys
    known = optimizer.state.get(param, {})
    if optimizer._zeros_differ(entry) or all(known.get(key) is not None for key in keys):
        return
    try:
        optimizer._refuse_half_state(group, index, keys)
    except _C.TensorError as error:
        raise optimizer._explained(*error.args) from None
    with torch.no_grad():
        optimizer._new_state(entry, param)
