"""How classes of faststep show a script what torch's do: names, arguments and pickles."""

from __future__ import annotations

import operator
from typing import Any


class _Free:
    """Stands for a name that faststep's class has and torch's has not; a script may set it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, shown: object, kind: type) -> Any:
        raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}")


class Current:
    """Stands for the constructor of a class of torch, which a script may replace."""

    def __init__(self, torchs: type) -> None:
        self._torchs = torchs

    def __get__(self, made: object, kind: type) -> Any:
        function = vars(self._torchs)["__init__"]
        bind = getattr(type(function), "__get__", None)
        return function if bind is None else bind(function, made, kind)


def hidden(torchs: type, ours: type) -> dict[str, Any]:
    """The attributes of a class that hides all public names of ours that torch's has not."""
    bases = (base for base in ours.__mro__ if not issubclass(torchs, base))
    own = {name for base in bases for name in vars(base) if not name.startswith("_")}
    return {name: _Free(name) for name in own if not hasattr(torchs, name)}


def reduced(torchs: type, state: Any) -> Any:
    """For pickle and copy: an object of torch's class, which `run` makes one of ours again."""
    return operator.methodcaller("__new__", torchs), (torchs,), state
