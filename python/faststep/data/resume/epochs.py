"""Epochs that a script sets on its dataset, on their way to the copies in persistent workers."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info


class SetEpoch:
    """A call of `set_epoch`. A worker process makes it, of its dataset, when this is unpickled."""

    def __init__(self, arguments: tuple[object, ...], options: dict[str, object]) -> None:
        self._call = arguments, options

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _call_in_worker, self._call

    def call(self, dataset: Any) -> None:
        arguments, options = self._call
        dataset.set_epoch(*arguments, **options)


def _call_in_worker(arguments: tuple[object, ...], options: dict[str, object]) -> None:
    info: Any = get_worker_info()
    SetEpoch(arguments, options).call(info.dataset)


class EpochListener:
    """Keeps the newest call of a dataset's `set_epoch`.

    The class that defines the method gets another one, which calls it and then notes the call.
    """

    def __init__(self, dataset: Any) -> None:
        self._newest: SetEpoch | None = None
        method = getattr(dataset, "set_epoch", None)
        self._called = getattr(method, "__self__", None)  # or what `dataset` passes calls on to
        for kind in type(self._called).__mro__:
            function = vars(kind).get("set_epoch")
            if isinstance(function, types.FunctionType):
                _listeners.add(self)
                if function not in _noting:
                    kind.set_epoch = _note(function)  # type: ignore[attr-defined]
                break

    def take(self) -> SetEpoch | None:
        """The newest call since this was asked last."""
        newest, self._newest = self._newest, None
        return newest


_listeners: weakref.WeakSet[EpochListener] = weakref.WeakSet()
_noting: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()


def _note(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def set_epoch(self: object, *arguments: object, **options: object) -> object:
        result = function(self, *arguments, **options)
        for listener in list(_listeners):
            if listener._called is self:
                listener._newest = SetEpoch(arguments, options)
        return result

    _noting.add(set_epoch)
    return set_epoch
