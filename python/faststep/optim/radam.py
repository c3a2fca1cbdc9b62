"""RAdam."""

import torch

from .arguments import composed
from .counted import CountedOptimizer
from .request import formula


@composed
class RAdam(CountedOptimizer, torch.optim.RAdam):
    """:class:`torch.optim.RAdam` (Liu et al. 2020, arXiv:1908.03265) with a step that is
    one C call.
    """

    _formula = formula("radam", "step", "exp_avg", "exp_avg_sq")
