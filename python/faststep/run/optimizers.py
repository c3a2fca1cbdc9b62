"""The classes of optimizers under `run`: faststep's steps, and the names of torch's classes.

A script that was not written for faststep may use `max_grad_norm` and the like for things of its
own: as a key of a parameter group, as an attribute, or as an argument that must not exist.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import optim
from ..optim.by_torch import LeftToTorchError
from .shown import hidden, reduced

NAMES = (
    *("ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "Adafactor"),
)

# What C and the reading of a group's numbers raise, where torch's step may raise none or another.
REFUSALS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


def _made(torchs: type, ours: type) -> Any:
    """The class of faststep with the constructor, the attributes and the pickles of torch's."""

    @functools.wraps(torchs.__init__)  # type: ignore[misc]
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        torchs.__init__(self, *args, **kwargs)  # type: ignore[misc]

    def getstate(self: Any) -> Any:
        return torch.optim.Optimizer.__getstate__(self)

    @functools.wraps(torch.optim.Optimizer.state_dict)
    def state_dict(self: Any) -> Any:
        return ours.state_dict(self)  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: Any) -> Any:
        if type(self) is not made:  # a wrapper of Lightning, say
            return super(made, self).__reduce_ex__(protocol)
        return reduced(torchs, getstate(self))

    def rules(self: Any, *args: Any) -> Any:
        try:
            return ours._rules(self, *args)  # type: ignore[attr-defined]
        except LeftToTorchError:
            raise
        except REFUSALS as error:
            # of a number that only torch can use, or refuses in its words
            raise LeftToTorchError(f"{type(error).__name__}: {error}") from None

    def factored_step(self: Any) -> None:
        try:
            ours._factored_step(self)  # type: ignore[attr-defined]
            return
        except LeftToTorchError as error:
            reason = error.reason
        self._step_by_torch(self.param_groups, reason)

    def called(self: Any, plan: Any, *args: Any) -> Any:
        try:
            return ours._called(self, plan, *args)  # type: ignore[attr-defined]
        except REFUSALS as error:
            if plan is not self._plans[0]:  # torch has stepped a part
                raise
            raise LeftToTorchError(f"{error}".removesuffix("; nothing was updated")) from None

    names = hidden(torchs, ours)
    names |= {"__init__": init, "__getstate__": getstate, "__reduce_ex__": reduce}
    names |= {"state_dict": state_dict, "_rules": rules}
    names |= {"__module__": __name__, "__doc__": torchs.__doc__, "_made_from": ours}
    if hasattr(ours, "_called"):  # Adafactor
        names |= {"_factored_step": factored_step, "_called": called}
    made: Any = type(torchs.__name__, (ours,), names)
    return made


CLASSES = {
    getattr(torch.optim, name): _made(getattr(torch.optim, name), getattr(optim, name))
    for name in NAMES
}
globals().update({kind.__name__: kind for kind in CLASSES.values()})  # for pickles of a class
