"""ASGD."""

from typing import Any

import torch

from .arguments import composed
from .base import number
from .counted import CountedOptimizer
from .request import formula


@composed
class ASGD(CountedOptimizer, torch.optim.ASGD):
    """:class:`torch.optim.ASGD` (Polyak & Juditsky 1992) with a step that is one C call.

    The average of a parameter is `state[param]["ax"]`.

    Args:
        lambd (float): decay of the parameter and of the learning rate.
        alpha (float): power of the decay of the learning rate.
        t0 (float): step at which averaging starts.
    """

    _formula = formula("asgd", "step", "eta", "mu", "ax")
    _numbers = ("eta", "mu")
    _counts_on_device = True
    _begins_by_rate = True

    def _first_number(self, group: dict[str, Any], key: str) -> float:
        return number(group["lr"]) if key == "eta" else 1.0
