"""Gradients as DistributedDataParallel reduces them, for updates in backward.

A communication hook takes the place of the model's own reduction and does the same; when a bucket
is there it hands each gradient to the release. The hook cannot be taken away again, so there is one
per model for good, which serves one release after the other.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ._torch import after_backward

__all__ = ["Reduced"]


class _User(Protocol):
    def reduced(self, param: Tensor, grad: Tensor) -> bool:
        """The gradient of a parameter is reduced; whether it was used, and may be freed."""


class Reduced:
    """The communication hook of one model, and for whom it works."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group
        self._factor = 1.0 / dist.get_world_size(self._group)
        self._user: weakref.ref[_User] | None = None
        ignored = model.parameters_to_ignore
        self._params = {
            id(param): weakref.ref(param)
            for name, param in model.module.named_parameters()
            if name not in ignored and param.requires_grad
        }
        model.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    @staticmethod
    def of(model: DistributedDataParallel) -> Reduced:
        """That of a model, which is made at first; TypeError where that is impossible."""
        if (known := _hooks.get(model)) is not None:
            if known._user is not None and known._user() is not None:
                raise RuntimeError(
                    "gradients of this DistributedDataParallel model are released already, with "
                    "another optimizer: give all parameters to one optimizer"
                )
            return known
        for option in ("find_unused_parameters", "static_graph"):
            if getattr(model, option, False):
                raise TypeError(
                    f"release_gradients() does not support DistributedDataParallel({option}=True): "
                    "which parameters were unused on all ranks is known only after their buckets "
                    "are reduced"
                )
        try:
            reduced = Reduced(model)
        except RuntimeError as error:
            raise TypeError(
                "release_gradients() needs the communication hook of the DistributedDataParallel "
                f"model, which has one already: {error}"
            ) from error
        _hooks[model] = reduced
        return reduced

    def __contains__(self, param: Tensor) -> bool:
        known = self._params.get(id(param))
        return known is not None and known() is param

    def use(self, user: _User | None) -> None:
        """Hand gradients to this object from now on, which is not kept alive."""
        self._user = None if user is None else weakref.ref(user)

    def _reduce(self, bucket: Any) -> Future[Tensor]:
        """The mean over the ranks, as without a hook."""
        values = bucket.buffer().mul_(self._factor)
        work = dist.all_reduce(values, group=self._group, async_op=True)
        params, grads = bucket.parameters(), bucket.gradients()
        user = None if self._user is None else self._user()
        used: list[Tensor] = []
        if user is not None:  # what DistributedDataParallel does after backward comes in between
            after_backward(lambda: after_backward(lambda: _free(used)))

        def use(future: Future[list[Tensor]]) -> Tensor:
            value: Tensor = future.value()[0]
            if user is not None:
                for param, grad in zip(params, grads, strict=True):
                    if user.reduced(param, grad):
                        used.append(param)
            return value

        reduced: Future[Tensor] = work.get_future().then(use)
        return reduced


def _free(params: list[Tensor]) -> None:
    for param in params:
        param.grad = None


_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, Reduced] = weakref.WeakKeyDictionary()
