"""The classes of torch.optim that count their steps, beside Adam, AdamW and Adagrad."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .arguments import composed
from .base import number
from .counted import CountedOptimizer
from .request import Formula, Rule, formula

_KEYS = ("step", "square_avg")  # of RMSprop


@composed
class Adadelta(CountedOptimizer, torch.optim.Adadelta):
    """:class:`torch.optim.Adadelta` (Zeiler 2012, arXiv:1212.5701) with a step that is one C call.

    Args:
        lr (float or Tensor): what the update is multiplied by.
        rho (float): decay of both averages of squares.
        eps (float): added to both averages.
    """

    _formula = formula("adadelta", "step", "square_avg", "acc_delta")


@composed
class Adamax(CountedOptimizer, torch.optim.Adamax):
    """:class:`torch.optim.Adamax` (Kingma & Ba 2015, arXiv:1412.6980) with a step that is
    one C call.

    Args:
        betas (tuple of two floats): decay of the first moment and of the infinity norm.
        eps (float): added to the size of a gradient.
    """

    _formula = formula("adamax", "step", "exp_avg", "exp_inf")


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
        return number(group["lr"]) if key == "eta" else super()._first_number(group, key)


@composed
class NAdam(CountedOptimizer, torch.optim.NAdam):
    """:class:`torch.optim.NAdam` (Dozat 2016) with a step that is one C call.

    Args:
        momentum_decay (float): how fast the coefficient of the momentum grows.
    """

    _formula = formula("nadam", "step", "mu_product", "exp_avg", "exp_avg_sq")
    _numbers = ("mu_product",)


@composed
class RAdam(CountedOptimizer, torch.optim.RAdam):
    """:class:`torch.optim.RAdam` (Liu et al. 2020, arXiv:1908.03265) with a step that is
    one C call.
    """

    _formula = formula("radam", "step", "exp_avg", "exp_avg_sq")


@composed
class RMSprop(CountedOptimizer, torch.optim.RMSprop):
    """:class:`torch.optim.RMSprop` with a step that is one C call.

    Args:
        alpha (float): decay of the average of squares.
        centered (bool): divide by an estimate of the standard deviation.
    """

    _formulas: ClassVar = {  # by whether there is momentum, and whether it is centered
        (False, False): formula("rmsprop", *_KEYS),
        (True, False): formula("rmsprop_momentum", *_KEYS, "momentum_buffer"),
        (False, True): formula("rmsprop_centered", *_KEYS, "grad_avg"),
        (True, True): formula("rmsprop_centered_momentum", *_KEYS, "momentum_buffer", "grad_avg"),
    }

    def _formula_of(self, group: dict[str, Any]) -> Formula:
        return self._formulas[bool(group["momentum"] > 0), bool(group["centered"])]


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
