"""Python objects whose methods do something else than one expects.

Each calls `act()` first, which does whatever the case at hand says: raise, change a container, drop
references, collect garbage, call the extension again.
"""

import threading
from collections.abc import Callable
from typing import Any


class BoomError(Exception):
    """What hostile objects raise."""


class BareBoomError(BaseException):
    """The same, for those who catch Exception only."""


_now = threading.local()


Does = Callable[[bool], None]  # told whether a finalizer asks


def act(finalizer: bool = False) -> None:
    does: Does | None = getattr(_now, "does", None)
    if does is not None:
        does(finalizer)


def use(does: Does | None) -> Does | None:
    """From now on hostile objects do this in this thread; returns what they did before."""
    before = getattr(_now, "does", None)
    _now.does = does
    return before


def _acting(base: type, name: str) -> Callable[..., Any]:
    plain = getattr(base, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        act()
        return plain(self, *args, **kwargs)

    return method


def _hostile(base: type, *names: str) -> type:
    """A subclass of a built-in type with these methods overridden."""
    methods = {name: _acting(base, name) for name in names}
    return type(f"Hostile{base.__name__.capitalize()}", (base,), {**methods, "__slots__": ()})


_COMMON = ("__eq__", "__hash__", "__repr__")
_SIZED = ("__getitem__", "__len__", "__iter__", "__contains__")
HostileList = _hostile(list, *_SIZED, "__eq__", "__repr__", "append", "__setitem__")
HostileTuple = _hostile(tuple, *_COMMON, *_SIZED)
HostileDict = _hostile(dict, *_SIZED, "__eq__", "__repr__", "__setitem__", "get", "items", "keys")
HostileStr = _hostile(str, *_COMMON, "__len__", "encode", "__getitem__")
HostileInt = _hostile(int, *_COMMON, "__index__", "__int__", "__float__", "__bool__")
HostileFloat = _hostile(float, *_COMMON, "__int__", "__float__", "__bool__")
HostileBytes = _hostile(bytes, *_COMMON, "__len__", "__getitem__")


class Duck:
    """Can be read as a number, a sequence, a path, a truth and an attribute holder."""

    def __init__(self, value: Any = 1) -> None:
        self.value = value

    def __index__(self) -> int:
        act()
        return int(self.value)

    def __float__(self) -> float:
        act()
        return float(self.value)

    def __bool__(self) -> bool:
        act()
        return bool(self.value)

    def __len__(self) -> int:
        act()
        return 3

    def __getitem__(self, index: int) -> Any:
        act()
        if index >= 3:
            raise IndexError(index)
        return self.value

    def __fspath__(self) -> str:
        act()
        return "/nowhere/at/all"

    @property
    def grad(self) -> Any:
        act()
        return None

    @property
    def _version(self) -> Any:
        act()
        return self.value


class Key:
    """A dictionary's key with the hash of something else, which its `__eq__` says to be or not."""

    def __init__(self, like: Any, equal: bool) -> None:
        self.code = hash(like)
        self.equal = equal

    def __hash__(self) -> int:
        return self.code

    def __eq__(self, other: object) -> bool:
        act()
        return self.equal


class Bomb:
    """Garbage in a cycle, whose finalizer runs wherever the collector does."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        act(finalizer=True)


def plain(value: Any) -> str:
    """Describes a value without running a method of it."""
    if isinstance(value, (list, tuple)):
        base = list if isinstance(value, list) else tuple
        inner = ", ".join(plain(item) for item in list(base.__iter__(value))[:8])
        return f"{type(value).__name__}({inner})"
    if isinstance(value, dict):
        pairs = list(dict.items(value))[:8]
        inner = ", ".join(f"{plain(k)}: {plain(v)}" for k, v in pairs)
        return f"{type(value).__name__}({inner})"
    for base in (bool, int, float, str, bytes):
        if isinstance(value, base):
            text = base.__repr__(value)
            return text[:60] if type(value) is base else f"{type(value).__name__}({text[:60]})"
    if hasattr(type(value), "__torch_function__"):
        return _plain_tensor(value)
    return f"<{type(value).__name__}>"


def _plain_tensor(tensor: Any) -> str:
    import torch

    try:
        with torch._C.DisableTorchFunctionSubclass():
            kind = f"{tuple(tensor.shape)} {str(tensor.dtype)[6:]} {tensor.layout} {tensor.device}"
            if tensor.layout == torch.strided and tensor.device.type == "cpu":
                kind += f" strides {tensor.stride()}{' neg' * tensor.is_neg()}"
    except Exception as error:
        kind = type(error).__name__
    return f"<{type(tensor).__name__} {kind}>"
