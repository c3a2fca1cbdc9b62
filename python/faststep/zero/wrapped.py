"""Gradients of a model inside DistributedDataParallel, which hands them over and reduces none.

The model's communication hook gets each of its buckets before it is reduced, copies the gradients
into ours, and returns it as it is. DistributedDataParallel puts that into `.grad` when backward
ends; after that the placeholders take its place. `no_sync()` of the model works as usual.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .._torch.compiler import disable_dynamo
from .._torch.ddp import current_backward
from .buckets import GradientBucket
from .gradients import Gradients
from .group import Group
from .pages import Shelf
from .slots import Slot
from .uses import Uses

__all__ = ["WrappedGradients", "check_wrapped"]


def check_wrapped(model: DistributedDataParallel, sharded: set[int]) -> None:
    """Raise TypeError for a model whose gradients cannot be taken over.

    Args:
        sharded: the parameters that are, by `id`.
    """
    for name, param in model.module.named_parameters():
        if param.requires_grad and id(param) not in sharded:
            raise TypeError(
                f"shard(): the DistributedDataParallel model has a parameter {name!r} that is not "
                "the optimizer's, whose gradient would no more be reduced: freeze it, or pass the "
                "module inside"
            )


class WrappedGradients(Gradients):
    """What Gradients does, with a model's communication hook in place of hooks on parameters."""

    def __init__(
        self,
        slots: list[Slot],
        buckets: list[GradientBucket],
        group: Group,
        shelf: Shelf,
        uses: type[Uses],
        model: DistributedDataParallel,
    ) -> None:
        self._model = weakref.ref(model)
        self._slot_of = {id(slot.param): slot for slot in slots}
        self._handles: list[Any] = []
        self._used: set[Slot] = set()  # that backward has reached on this rank
        self._is_shadowed = False  # whether the model takes part in a backward without data
        super().__init__(slots, buckets, group, shelf, uses)

    def _attach(self) -> None:
        model = self._model()
        assert model is not None
        mine = weakref.ref(self)
        try:
            model.register_comm_hook(None, lambda _, bucket: _take(mine(), bucket))
        except RuntimeError as error:
            raise TypeError(
                "shard() needs the communication hook of the DistributedDataParallel model, which "
                f"has one already: {error}"
            ) from error
        for slot in self._slots:
            before = slot.param.register_hook(_hook(mine, slot, "look"))  # type: ignore[no-untyped-call]
            self._handles.append(before)
            self._hooks.add(slot.param, slot, _hook(mine, slot, "make_room"))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """That of the model."""
        model = self._model()
        with contextlib.nullcontext() if model is None else model.no_sync():
            yield

    def look(self, slot: Slot) -> None:
        """Called before backward adds to `.grad`, and by torch.autograd.grad(), which does not."""
        if slot.param.grad is None:
            slot.aside = False

    def make_room(self, slot: Slot) -> None:
        """Called when backward has added to `.grad`, where the model must find a real tensor."""
        self._unsent = True
        self._used.add(slot)
        if slot.param.grad is slot.stand_in:
            slot.param.grad, slot.stand_in.pending = slot.stand_in.pending, None
            slot.aside = True

    def take(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Called with the gradients of one of the model's buckets.

        With find_unused_parameters or static_graph some are zeros of parameters that were not used.
        """
        if current_backward() < 0:  # by torch.distributed.algorithms.Join
            self._is_shadowed = True
            return
        self._note_pass()
        for param, grad in zip(params, grads, strict=True):
            slot = self._slot_of[id(param)]
            if slot not in self._used:
                continue
            if slot.held and not slot.aside:
                self._buckets[slot.bucket].forget(slot)
            self._put(slot, grad)

    def begin_empty(self) -> bool:
        """Begin a pass without gradients of this rank, if the model has found that there is one."""
        found, self._is_shadowed = self._is_shadowed, False
        return found and super().begin_empty()

    def finish(self) -> None:
        """Send what is left, and wait until this rank's slices are complete; a collective."""
        super().finish()
        self._used.clear()

    def close(self) -> None:
        """Take the hooks away; torch cannot remove that of the model."""
        super().close()
        for handle in self._handles:
            handle.remove()


def _take(gradients: WrappedGradients | None, bucket: Any) -> Future[Tensor]:
    if gradients is None:
        raise RuntimeError(
            "faststep.zero: the optimizer that shard() returned is gone, and nobody reduces the "
            "gradients of this DistributedDataParallel model"
        )
    with torch.no_grad():
        gradients.take(list(bucket.parameters()), list(bucket.gradients()))
    values = bucket.buffer()
    devices = [values.device] if values.is_cuda else None
    done: Future[Tensor] = Future(devices=devices)  # whoever waits for it waits for these streams
    done.set_result(values)
    return done


def _hook(
    owner: Callable[[], WrappedGradients | None], slot: Slot, method: str
) -> Callable[[Tensor], None]:
    @disable_dynamo
    def call(_: Tensor) -> None:
        if (gradients := owner()) is not None:
            with torch.no_grad():
                getattr(gradients, method)(slot)

    return call
