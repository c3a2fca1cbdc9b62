"""The ranks of a window: no communication inside of it, sums over all of them at its end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._torch.compiler import uncompiled
from .._torch.ddp import rebuild_buckets
from .._torch.fsdp import drop_local_grads, fsdp_modules_of, groups_of_fsdp, reduce_local_grads

_ALONE = 1 << 18  # elements; a tensor of at least so many is reduced in place
_BUCKET = 1 << 22  # elements; smaller tensors are copied into buckets of at most this size


class ZeroOptimizer(Protocol):
    """The parts of faststep.zero's optimizers that accumulation uses."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside send nothing."""

    @property
    def sums_in_fp32(self) -> bool:
        """True if the ranks' gradients of low-precision parameters are added up in fp32."""

    def add_up(self, numbers: torch.Tensor) -> int:
        """Replace numbers by their sums over all ranks; the number of ranks."""

    def reduce(self) -> None:
        """Reduce what no_sync() has left."""


def is_sharded(optimizer: Any) -> TypeGuard[ZeroOptimizer]:
    """True if this is an optimizer of faststep.zero, which builds on nothing of this folder."""
    return isinstance(optimizer, Optimizer) and hasattr(type(optimizer), "add_up")


class Ranks:
    """The ranks that train one model; alone for a model without DistributedDataParallel.

    Args:
        model: the module that the loop calls, or None.

    Raises:
        TypeError: the model is sharded or wrapped in a way that is not supported.
    """

    knows_model = False  # whether nobody else reduces the gradients
    reduces = False  # whether `reduce` puts means into `.grad`, where others need `add_up`
    keeps_sums = False  # whether the sums of an open window are where `.grad` does not show them

    def __init__(self, model: nn.Module | None) -> None:
        self._quiet = contextlib.ExitStack()
        self._model: DistributedDataParallel | None = None
        self._groups: list[Any] = []
        self._device = torch.device("cpu")
        if model is None:
            return
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        inner = uncompiled(model)
        if isinstance(inner, DistributedDataParallel):
            if getattr(inner, "static_graph", False):
                raise TypeError(
                    "accumulate() does not support DistributedDataParallel(static_graph=True): "
                    "torch's fails when its first backward is inside no_sync()"
                )
            self._model, self.knows_model = inner, True
            self._reduce_over([inner.process_group], model)
            return
        for name, part in inner.named_modules():
            if hasattr(part, "no_sync") or hasattr(part, "set_requires_gradient_sync"):
                inside = f" (its submodule {name!r})" if name else ""
                raise TypeError(
                    f"accumulate() does not support {type(part).__name__} models{inside}; model= "
                    "must be a plain module, a DistributedDataParallel itself or a model of "
                    "fully_shard"
                )

    def _reduce_over(self, groups: list[Any], model: nn.Module) -> None:
        self._groups = groups
        self._device = next((param.device for param in model.parameters()), self._device)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return math.prod(map(dist.get_world_size, self._groups))

    def set_quiet(self, quiet: bool) -> None:
        """Keep the model from communicating in forward and backward; False allows it again."""
        self._quiet.close()
        if quiet and self._model is not None:
            self._quiet.enter_context(self._model.no_sync())

    def drop(self) -> None:
        """Drop the sums of the open window that are not in `.grad`."""

    def synchronized(self) -> None:
        """After a backward that communicated."""
        if self._model is not None:
            rebuild_buckets(self._model)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums of these numbers over all ranks; a collective."""
        exact = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        self._total(exact)
        found: list[float] = exact.tolist()
        return found

    def _total(self, numbers: Tensor) -> None:
        for group in self._groups:
            dist.all_reduce(numbers, group=group)

    def reduce(self) -> None:
        """Reduce the gradients of a window that ended early to their mean; a collective."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all ranks, which pass the same shapes; collectives."""
        if self._model is None:
            return
        group = self._model.process_group
        pairs = []  # (what is reduced, the tensors that it is a copy of, by their indices)
        small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.numel() >= _ALONE:
                pairs.append((tensor.contiguous(), [index]))
            else:
                small.setdefault((tensor.dtype, tensor.device), []).append(index)
        for alike in small.values():
            for bucket in _buckets(tensors, alike):
                pairs.append((torch.cat([tensors[index].reshape(-1) for index in bucket]), bucket))
        waiting = [dist.all_reduce(values, group=group, async_op=True) for values, _ in pairs]
        for work, (values, bucket) in zip(waiting, pairs, strict=True):
            work.wait()
            parts = torch.split(values.view(-1), [tensors[index].numel() for index in bucket])
            for index, part in zip(bucket, parts, strict=True):
                if part.data_ptr() != tensors[index].data_ptr():
                    tensors[index].copy_(part.view(tensors[index].shape))


class ShardedRanks(Ranks):
    """Ranks whose gradients an optimizer of faststep.zero reduces."""

    knows_model = reduces = True

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        super().__init__(None)
        self._optimizer = optimizer

    @property
    def world(self) -> int:
        return self._optimizer.add_up(torch.zeros(0))

    def set_quiet(self, quiet: bool) -> None:
        self._quiet.close()
        if quiet:
            self._quiet.enter_context(self._optimizer.no_sync())

    def _total(self, numbers: Tensor) -> None:
        self._optimizer.add_up(numbers)

    def reduce(self) -> None:
        self._optimizer.reduce()


class FullyShardedRanks(Ranks):
    """The ranks of a model to which fully_shard was applied.

    Until the last micro-step the sums of whole gradients stay inside FSDP2, and `.grad` is None.
    """

    knows_model = reduces = keeps_sums = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(None)
        self._modules = fsdp_modules_of(uncompiled(model))
        self._reduce_over(groups_of_fsdp(self._modules), model)

    def set_quiet(self, quiet: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(not quiet, recurse=False)

    def reduce(self) -> None:
        reduce_local_grads(self._modules)

    def drop(self) -> None:
        drop_local_grads(self._modules)


def ranks_of(optimizer: Optimizer, model: nn.Module | None) -> Ranks:
    """Who reduces the gradients."""
    if isinstance(model, nn.Module) and fsdp_modules_of(uncompiled(model)):
        return FullyShardedRanks(model)
    return ShardedRanks(optimizer) if is_sharded(optimizer) else Ranks(model)


def _buckets(tensors: Sequence[Tensor], alike: list[int]) -> list[list[int]]:
    """The tensors in their order, cut into lists of at most _BUCKET elements in all."""
    buckets: list[list[int]] = []
    size = _BUCKET
    for index in alike:
        if size + tensors[index].numel() > _BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(index)
        size += tensors[index].numel()
    return buckets
