"""Blocks that save less for backward, with nothing replaced but their `forward`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        options: dict[str, Any] = {"context_fn": self._contexts} if self._changing else {}
        bound = functools.partial(plain, **kwargs)
        return checkpoint(bound, *args, use_reentrant=False, **options)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        first = [getattr(module, name).clone() for module, name in self._changing]
        return contextlib.nullcontext(), _Earlier(self._changing, first)


class _Earlier(AbstractContextManager[None]):
    """Lets modules have earlier values of buffers; backward may enter it several times."""

    def __init__(self, buffers: Buffers, values: list[Tensor]) -> None:
        self._buffers, self._values = buffers, values
        self._now: list[Tensor] = []

    def __enter__(self) -> None:
        self._now = [getattr(module, name) for module, name in self._buffers]
        self._set([value.clone() for value in self._values])

    def __exit__(self, *_: object) -> None:
        self._set(self._now)

    def _set(self, values: list[Tensor]) -> None:
        for (module, name), value in zip(self._buffers, values, strict=True):
            setattr(module, name, value)


def warm_up() -> None:
    """Let torch import what its checkpoints need, tens of MiB, before memory is measured."""
    checkpoint(torch.square, torch.ones(1, requires_grad=True), use_reentrant=False)
