"""Blocks that save less for backward, with nothing replaced but their `forward`."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .._torch.modes import is_transformed
from .._torch.tensors import tree_iter
from .saving import save_on_cpu

Buffers = Sequence[tuple[nn.Module, str]]  # each with the module that has it


class Replaced:
    """Takes the place of a block's `forward`.

    It is an attribute of the block, so names, classes and hooks of the block stay. It refers to the
    block, so that a copy of the block has one that refers to the copy.

    Args:
        block: whose forward it is, once it is put there.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._replaced: Callable[..., Any] | None = vars(block).get("forward")

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward that it calls; `inspect.signature` looks for it, too."""
        return self._replaced or functools.partial(type(self._block).forward, self._block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def put(self) -> None:
        """Let the block use it."""
        self._block.forward = self

    def take_off(self) -> None:
        """Let the block have its forward back."""
        if vars(self._block).get("forward") is not self:
            self.__class__ = Replaced  # a script has put something around it
            return
        del self._block.forward
        if self._replaced is not None:
            self._block.forward = self._replaced


class Offloaded(Replaced):
    """The `forward` of a block under `save_on_cpu`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu():
            return super().__call__(*args, **kwargs)


class Recomputed(Replaced):
    """The `forward` of a block under `torch.utils.checkpoint`, not reentrant.

    Args:
        block: as of Replaced.
        changing: buffers that forward changes, as running statistics. The second forward gets the
            values that the first one got, and leaves them as they are.
    """

    def __init__(self, block: nn.Module, changing: Buffers = ()) -> None:
        super().__init__(block)
        self._changing = list(changing)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = self.__wrapped__
        is_compiling = torch.compiler.is_compiling()
        if not torch.is_grad_enabled() or (not is_compiling and is_transformed()):
            return plain(*args, **kwargs)  # torch.func refuses hooks of saved tensors
        options: dict[str, Any] = {}
        if not is_compiling:
            options["context_fn"] = functools.partial(self._contexts, (args, kwargs))
        elif self._changing:
            options["context_fn"] = self._contexts
        bound = functools.partial(plain, **kwargs)
        return checkpoint(bound, *args, use_reentrant=False, **options)

    def _contexts(
        self, given: object = ()
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return contextlib.nullcontext(), _Earlier(self._block, given, self._changing)


class Drawn(AbstractContextManager[None]):
    """Lets Python and NumPy draw as when it was made, and afterwards as if they had not."""

    def __init__(self) -> None:
        self._then = self._now = _random_state()

    def __enter__(self) -> None:
        self._now = _random_state()
        _set_random_state(*self._then)

    def __exit__(self, *_: object) -> None:
        _set_random_state(*self._now)


def _random_state() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)


def _set_random_state(python: Any, numpy: Any) -> None:
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


class _Earlier(Drawn):
    """Lets a block find what it found when this was made; backward may enter it several times."""

    def __init__(self, block: nn.Module, given: object, buffers: Buffers) -> None:
        super().__init__()
        self._block, self._buffers = block, buffers
        self._params = [*block.parameters()]
        inputs = [one for one in tree_iter(given) if isinstance(one, Tensor)]
        found = [one for one in (*inputs, *self._params) if not one.is_inference()]
        self._found = [(one, one._version) for one in found]
        self._values = [getattr(module, name).clone() for module, name in buffers]
        self._buffers_now: list[Tensor] = []

    def __enter__(self) -> None:
        pairs = zip(self._block.parameters(), self._params, strict=True)
        others = (now for now, then in pairs if now is not then)
        is_other = any(isinstance(one, nn.Parameter) for one in others)  # no view of FSDP1
        if is_other or any(one._version != version for one, version in self._found):
            raise RuntimeError(
                f"a checkpointed {type(self._block).__name__} cannot be computed again: one of its "
                "inputs or parameters was changed in place, or exchanged, after it was entered"
            )
        super().__enter__()
        self._buffers_now = [getattr(module, name) for module, name in self._buffers]
        self._set([value.clone() for value in self._values])

    def __exit__(self, *_: object) -> None:
        self._set(self._buffers_now)
        super().__exit__()

    def _set(self, values: list[Tensor]) -> None:
        for (module, name), value in zip(self._buffers, values, strict=True):
            setattr(module, name, value)


def warm_up() -> None:
    """Let torch import what its checkpoints need, tens of MiB, before memory is measured."""
    checkpoint(torch.square, torch.ones(1, requires_grad=True), use_reentrant=False)
