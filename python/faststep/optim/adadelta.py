"""Adadelta."""

import torch

from .arguments import composed
from .counted import CountedOptimizer
from .request import formula


@composed
class Adadelta(CountedOptimizer, torch.optim.Adadelta):
    """:class:`torch.optim.Adadelta` (Zeiler 2012, arXiv:1212.5701) with a step that is one C call.

    Args:
        lr (float or Tensor): what the update is multiplied by.
        rho (float): decay of both averages of squares.
        eps (float): added to both averages.
    """

    _formula = formula("adadelta", "step", "square_avg", "acc_delta")
