"""NAdam."""

from typing import Any

import torch

from .arguments import composed
from .counted import CountedOptimizer
from .request import formula


@composed
class NAdam(CountedOptimizer, torch.optim.NAdam):
    """:class:`torch.optim.NAdam` (Dozat 2016) with a step that is one C call.

    Args:
        momentum_decay (float): how fast the coefficient of the momentum grows.
    """

    _formula = formula("nadam", "step", "mu_product", "exp_avg", "exp_avg_sq")
    _numbers = ("mu_product",)

    def _first_number(self, group: dict[str, Any], key: str) -> float:
        return 1.0
