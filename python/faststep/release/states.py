"""States of parameters that are updated in backward, made before the first backward."""

from __future__ import annotations

import torch

from .. import _C
from ..optim.base import FusedOptimizer
from ..optim.masters import begin_state, keys_for, own_keys

__all__ = ["make_state"]


def make_state(optimizer: FusedOptimizer, group: int, index: int) -> None:
    """Make the state of a parameter, unless a state of zeros would change the next step.

    States that are made in backward lie between gradients. The gaps that freed gradients leave
    there are too small for the next ones, so malloc keeps most of the memory that release saves.
    """
    entry = optimizer.param_groups[group]
    param = entry["params"][index]
    rule = optimizer._checked_rule_of(entry)
    keys = keys_for(rule, param)
    known = optimizer.state.get(param, {})
    if optimizer._zeros_differ(entry) or all(known.get(key) is not None for key in keys):
        return
    try:
        optimizer._refuse_half_state(group, index, own_keys(rule))
    except _C.TensorError as error:
        raise optimizer._explained(*error.args) from None
    with torch.no_grad():
        begin_state(optimizer, entry, rule, param)
