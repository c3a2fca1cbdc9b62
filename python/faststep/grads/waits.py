"""Lets a forward pass wait for each parameter only when it comes to a module that uses it.

A module waits for its own parameters before its forward. While parameters of a module are on their
way, a dict that waits when it is read stands in the place of `module._parameters`, through which
torch serves attributes, named_parameters() and state_dict(). So others that use them wait too: some
modules use their children's parameters without calling them (torch.nn.MultiheadAttention).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

from torch import nn

from .._torch.compiler import disable_dynamo


def _after_arrival(name: str) -> Any:
    """A method of dict that waits first."""
    plain = getattr(dict, name)

    def method(self: _Arriving, *args: Any) -> Any:
        for wait in list(self.waits.values()):
            wait()
        self.waits.clear()
        self.put_back()
        return plain(self, *args)

    return method


class _Arriving(dict[str, Any]):
    """The parameters of a module, which arrive before somebody gets one; then the plain dict is
    put back.

    Attributes:
        waits: those of each optimizer that has some of them under way.
    """

    def __init__(self, module: nn.Module) -> None:
        self._plain = vars(module)["_parameters"]
        super().__init__(self._plain)
        self._module = weakref.ref(module)
        self.waits: dict[ForwardWaits, Callable[[], None]] = {}

    def put_back(self, arrived: ForwardWaits | None = None) -> None:
        """Let the module have its own dict again, with what was changed, if all has arrived."""
        module = self._module()
        if arrived is not None:
            self.waits.pop(arrived, None)
        if not self.waits and module is not None and vars(module)["_parameters"] is self:
            self._plain.clear()
            self._plain.update(super().items())
            vars(module)["_parameters"] = self._plain

    __getitem__, get, items, values, copy = map(
        _after_arrival, ("__getitem__", "get", "items", "values", "copy")
    )

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # without this method dict() reads past the others

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return dict, (self.copy(),)


class _BeforeForward:
    """A forward pre-hook that keeps nothing alive; of a pickled module it does nothing."""

    def __init__(self, waits: ForwardWaits | None = None) -> None:
        self._waits = None if waits is None else weakref.ref(waits)

    def __reduce__(self) -> Any:
        return _BeforeForward, ()

    def __deepcopy__(self, _: Any) -> _BeforeForward:
        return self

    @disable_dynamo
    def __call__(self, module: nn.Module, *_: Any) -> None:
        waits = None if self._waits is None else self._waits()
        if waits is not None:
            waits._before_forward(module)


class ForwardWaits:
    """The hooks of one model.

    `bucket_of` has the bucket of each parameter, by its `id`. `wait` returns when these buckets
    have arrived; all of them for None.
    """

    def __init__(
        self,
        model: nn.Module,
        bucket_of: Mapping[int, int],
        wait: Callable[[Iterable[int] | None], None],
    ) -> None:
        self._wait = wait
        self._own: dict[nn.Module, set[int]] = {}
        self._users: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            own = self._own[module] = {
                bucket_of[id(param)]
                for param in module.parameters(recurse=False)
                if id(param) in bucket_of
            }
            for bucket in own:
                self._users.setdefault(bucket, []).append(module)
        called = _BeforeForward(self)
        self._handles = [m.register_forward_pre_hook(called, prepend=True) for m in self._own]

    def _before_forward(self, module: nn.Module) -> None:
        self._wait(self._own.get(module))  # a copy of a module waits for all
        self._put_back(module)  # torch.compile looks at the class of the dict

    def cover(self, bucket: int) -> None:
        """Called when a bucket goes on its way: whoever reads its parameters in a module waits."""
        for module in self._users.get(bucket, ()):
            params = vars(module).get("_parameters")
            if type(params) is dict:
                params = vars(module)["_parameters"] = _Arriving(module)
            if isinstance(params, _Arriving):
                params.waits[self] = functools.partial(self._wait, self._own[module])

    def uncover(self) -> None:
        """Called when all parameters are there."""
        for module in self._own:
            self._put_back(module)

    def _put_back(self, module: nn.Module) -> None:
        if isinstance(arriving := vars(module).get("_parameters"), _Arriving):
            arriving.put_back(self)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
