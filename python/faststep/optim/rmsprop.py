"""RMSprop."""

from typing import Any, ClassVar

import torch

from .arguments import composed
from .counted import CountedOptimizer
from .request import Formula, formula

_KEYS = ("step", "square_avg")


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
