"""Parameters with a hook in backward, and what is known of each.

The release of gradients, the fp32 sums, shards and the buckets of DistributedDataParallel each keep
one `Hooked`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from .._torch.compiler import disable_dynamo

_Entry = TypeVar("_Entry")
_Result = TypeVar("_Result")


class _Weakly:
    """See `weakly`."""

    def __init__(self, method: Any = None) -> None:
        self._owner = None if method is None else weakref.ref(method.__self__)
        self._function: Any = getattr(method, "__func__", None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Weakly, ()

    def __deepcopy__(self, _: Any) -> _Weakly:
        return self

    @disable_dynamo
    def __call__(self, *args: Any) -> Any:
        owner = None if self._owner is None else self._owner()
        return None if owner is None else self._function(owner, *args)


def weakly(method: Callable[..., _Result]) -> Callable[..., _Result | None]:
    """A hook that calls a method while its object lives, and does not keep that alive.

    torch.compile calls it and does not look into it. Of a model that was saved it does nothing.
    """
    return _Weakly(method)


class _Known(NamedTuple):
    param: weakref.ref[Tensor]
    entry: Any
    handle: Any  # removes the hook; None without one


class Hooked(Generic[_Entry]):
    """An entry per parameter, and a hook that runs when the gradient is in `.grad`.

    No parameter is kept alive. The hooks go when this object goes, so a hook must refer to it, or
    to an object that has it, by a weak reference only.

    A parameter is found by its `id`, which another tensor may have after it has died. Each look-up
    makes sure that it is the same object.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        weakref.finalize(self, _remove, self._known).atexit = False

    def __len__(self) -> int:
        """The number of entries, of dead parameters too."""
        return len(self._known)

    def __iter__(self) -> Iterator[tuple[Tensor, _Entry]]:
        """The parameters that live and their entries, in the order in which they came."""
        for known in self._known.values():
            if (param := known.param()) is not None:
                yield param, known.entry

    def __contains__(self, param: Tensor) -> bool:
        known = self._known.get(id(param))
        return known is not None and known.param() is param

    def of(self, param: Tensor) -> _Entry | None:
        """The entry of a parameter, if it has one."""
        known = self._known.get(id(param))
        return known.entry if known is not None and known.param() is param else None

    def of_each(self, params: Iterable[Tensor]) -> list[_Entry | None]:
        """The entries of many parameters, None for those without one."""
        return [
            known.entry if known is not None and known.param() is param else None
            for param in params
            for known in (self._known.get(id(param)),)
        ]

    def entries(self) -> list[_Entry]:
        """All entries, those of dead parameters too."""
        return [known.entry for known in self._known.values()]

    def add(
        self, param: Tensor, entry: _Entry, hook: Callable[[Tensor], None] | None = None
    ) -> None:
        """Keep an entry, and call `hook` with the parameter after all hooks that it has.

        The hook of a frozen parameter is called once it is trained.
        """
        handle = None
        if hook is not None:
            is_frozen = not param.requires_grad
            param.requires_grad_(True)  # torch takes no hook of a frozen one
            handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            param.requires_grad_(not is_frozen)
        self._known[id(param)] = _Known(weakref.ref(param), entry, handle)

    def keep_only(self, params: Iterable[Tensor]) -> None:
        """Let go of all other parameters."""
        for key in self._known.keys() - set(map(id, params)):
            _remove_one(self._known.pop(key))

    def remove(self) -> None:
        """Let go of all parameters."""
        _remove(self._known)


def _remove(known: dict[int, _Known]) -> None:
    for one in known.values():
        _remove_one(one)
    known.clear()


def _remove_one(known: _Known) -> None:
    if known.handle is not None:
        known.handle.remove()
