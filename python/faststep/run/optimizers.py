"""The classes of optimizers under `run`: faststep's steps, and the names of torch's classes.

A script that was not written for faststep may use `max_grad_norm` and the like for things of its
own: as a key of a parameter group, as an attribute, or as an argument that must not exist.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from .. import optim

NAMES = (
    *("ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "Adafactor"),
)


class _Free:
    """Stands for a name that faststep's class has and torch's has not; a script may set it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: object, kind: type) -> Any:
        raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}")


def _made(torchs: type, ours: type) -> Any:
    """The class of faststep with the constructor, the attributes and the pickles of torch's."""

    @functools.wraps(torchs.__init__)  # type: ignore[misc]
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        torchs.__init__(self, *args, **kwargs)  # type: ignore[misc]

    def getstate(self: Any) -> Any:
        return torch.optim.Optimizer.__getstate__(self)

    def reduced(self: Any, protocol: Any) -> Any:
        """As an object of torch's class. `run` makes it one of ours again."""
        if type(self) is not made:  # a wrapper of Lightning, say
            return super(made, self).__reduce_ex__(protocol)
        return operator.methodcaller("__new__", torchs), (torchs,), getstate(self)

    bases = (base for base in ours.__mro__ if not issubclass(torchs, base))
    own = {name for base in bases for name in vars(base) if not name.startswith("_")}
    names: dict[str, Any] = {name: _Free() for name in own if not hasattr(torchs, name)}
    names |= {"__init__": init, "__getstate__": getstate, "__reduce_ex__": reduced}
    names |= {"__module__": __name__, "__doc__": torchs.__doc__, "_made_from": ours}
    made: Any = type(torchs.__name__, (ours,), names)
    return made


CLASSES = {
    getattr(torch.optim, name): _made(getattr(torch.optim, name), getattr(optim, name))
    for name in NAMES
}
globals().update({kind.__name__: kind for kind in CLASSES.values()})  # for pickles of a class
