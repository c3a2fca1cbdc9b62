"""Gradients that DistributedDataParallel has reduced, for code that uses them during backward.

A communication hook replaces the model's own reduction and computes the same mean. When a bucket is
reduced, the hook hands each gradient to its user, a released optimizer. torch cannot remove a
communication hook, so each model gets one, for one user after another.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .._torch.ddp import after_backward
from .._torch.ranks import instances_of, world_size
from .hooks import Hooked


def reducing_model(params: Iterable[Tensor]) -> DistributedDataParallel | None:
    """A DistributedDataParallel that reduces the gradient of one of these, if there is one.

    A module does not know what wraps it, so this looks at all objects, which takes some time.
    """
    if world_size() <= 1:
        return None
    wanted = set(map(id, params))
    for model in list(instances_of(DistributedDataParallel)):
        complete = hasattr(model, "reducer")
        if complete and any(id(param) in wanted for param in _reduced_params(model)):
            return model
    return None


def _reduced_params(model: DistributedDataParallel) -> Iterator[Tensor]:
    ignored = model.parameters_to_ignore
    for name, param in model.module.named_parameters():
        if name not in ignored and param.requires_grad:
            yield param


class User(Protocol):
    """Receives reduced gradients, also those of parameters that it does not know."""

    def reduced(self, param: Tensor, values: Tensor) -> None:
        """`values` are the gradient of a parameter. A thread of the process group calls this."""

    def ended(self) -> None:
        """Backward is over, and the values are in `.grad`."""


class Reduced:
    """The communication hook of one model, and its user, which it does not keep alive."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group
        self._factor = 1.0 / world_size(self._group)
        self._user: weakref.ref[User] | None = None
        self._params: Hooked[None] = Hooked()
        for param in _reduced_params(model):
            self._params.add(param, None)
        model.register_comm_hook(self, _reduce)

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced.__new__, (Reduced,)  # a model that is loaded reduces by itself

    @staticmethod
    def of(model: DistributedDataParallel, wanted_by: str) -> Reduced:
        """The hook of a model, made by the first call; TypeError where the model allows none."""
        if (known := _hooks.get(model)) is not None:
            return known
        for option in ("find_unused_parameters", "static_graph"):
            if getattr(model, option, False):
                raise TypeError(
                    f"{wanted_by} does not support DistributedDataParallel({option}=True): which "
                    "parameters were unused on all ranks is known only after their buckets are "
                    "reduced"
                )
        try:
            reduced = Reduced(model)
        except RuntimeError as error:
            raise TypeError(
                f"{wanted_by} needs the communication hook of the DistributedDataParallel "
                f"model, which has one already: {error}"
            ) from error
        _hooks[model] = reduced
        return reduced

    def __contains__(self, param: Tensor) -> bool:
        return param in self._params

    @property
    def user(self) -> User | None:
        """The object that receives gradients."""
        return None if self._user is None else self._user()

    @user.setter
    def user(self, user: User | None) -> None:
        self._user = None if user is None else weakref.ref(user)

    def reduce(self, bucket: Any) -> Future[Tensor]:
        """The mean over the ranks, as without a hook."""
        values = bucket.buffer().mul_(self._factor)
        work = dist.all_reduce(values, group=self._group, async_op=True)
        user = self.user
        pairs = [] if user is None else _pairs_of(bucket)
        if user is not None:  # before the model queues its own, which it does after the last bucket
            ended = user.ended
            after_backward(lambda: after_backward(ended))

        def use(future: Future[list[Tensor]]) -> Tensor:
            value: Tensor = future.value()[0]
            if user is not None:
                for param, part in pairs:
                    user.reduced(param, part)
            return value

        reduced: Future[Tensor] = work.get_future().then(use)
        return reduced


def _reduce(reduced, bucket):  # type: ignore[no-untyped-def] # torch compares annotations
    return reduced.reduce(bucket)


def _pairs_of(bucket: Any) -> list[tuple[Tensor, Tensor]]:
    """Each parameter with its part of the bucket, as a view with the parameter's own strides."""
    pairs = []
    for param, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if part.stride() != param.stride():
            dense = torch.empty_like(param, device="meta").stride()
            if dense == param.stride():  # else the bucket has its elements one after another
                part = part.as_strided(param.shape, dense)
        pairs.append((param, part))
    return pairs


_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, Reduced] = weakref.WeakKeyDictionary()
