"""Adamax."""

import torch

from .arguments import composed
from .counted import CountedOptimizer
from .request import formula


@composed
class Adamax(CountedOptimizer, torch.optim.Adamax):
    """:class:`torch.optim.Adamax` (Kingma & Ba 2015, arXiv:1412.6980) with a step that is
    one C call.

    Args:
        betas (tuple of two floats): decay of the first moment and of the infinity norm.
        eps (float): added to the size of a gradient.
    """

    _formula = formula("adamax", "step", "exp_avg", "exp_inf")
