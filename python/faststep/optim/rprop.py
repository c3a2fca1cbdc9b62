"""Rprop."""

from typing import Any

import torch
from torch import Tensor

from .arguments import composed
from .base import number
from .counted import CountedOptimizer
from .request import Rule, formula


@composed
class Rprop(CountedOptimizer, torch.optim.Rprop):
    """:class:`torch.optim.Rprop` (Riedmiller & Braun 1993) with a step that is one C call.

    The sign of the product of two gradients is exact. torch's product underflows in float16, at
    gradients of about 1e-4: then its step sizes stay, and ours change.

    Args:
        lr (float or Tensor): the first step size of every element.
        etas (tuple of two floats): a step size is multiplied by the first where the gradient's sign
            has turned, and by the second where it has not.
        step_sizes (tuple of two floats): the smallest and the largest one.
    """

    _formula = formula("rprop", "step", "prev", "step_size")
    _begins_by_rate = True

    def _new_tensor(self, group: dict[str, Any], rule: Rule, param: Tensor, key: str) -> Tensor:
        new = super()._new_tensor(group, rule, param, key)
        return new.fill_(number(group["lr"])) if key == "step_size" else new
