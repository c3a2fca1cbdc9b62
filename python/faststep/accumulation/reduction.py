"""DistributedDataParallel: no communication inside a window, sums over the ranks at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._torch.compiler import uncompiled
from .._torch.ddp import rebuild_buckets
from .._torch.ranks import world_size

_ALONE = 1 << 18  # elements; a tensor of at least so many is reduced in place
_BUCKET = 1 << 22  # elements; smaller tensors are copied into buckets of at most this size


class Ranks:
    """The ranks that train one model; alone for a model without DistributedDataParallel.

    Args:
        model: the module that the loop calls, or None.

    Raises:
        TypeError: the model is sharded or wrapped in a way that is not supported.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._quiet = contextlib.ExitStack()
        self._model: DistributedDataParallel | None = None
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
            self._model = inner
            return
        for name, part in inner.named_modules():
            if hasattr(part, "no_sync") or hasattr(part, "set_requires_gradient_sync"):
                inside = f" (its submodule {name!r})" if name else ""
                raise TypeError(
                    f"accumulate() does not support {type(part).__name__} models{inside}; model= "
                    "must be a plain module, a DistributedDataParallel itself or a model of "
                    "fully_shard"
                )

    @property
    def knows_model(self) -> bool:
        """True if the model is a DistributedDataParallel."""
        return self._model is not None

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return 1 if self._model is None else world_size(self._model.process_group)

    def set_quiet(self, quiet: bool) -> None:
        """Keep the model from communicating in forward and backward; False allows it again."""
        self._quiet.close()
        if quiet and self._model is not None:
            self._quiet.enter_context(self._model.no_sync())

    @property
    def keeps_sums(self) -> bool:
        """True if the sums of an open window are where `.grad` does not show them."""
        return False

    def drop(self) -> None:
        """Drop the sums of the open window that are not in `.grad`."""

    def synchronized(self) -> None:
        """After a backward that communicated."""
        if self._model is not None:
            rebuild_buckets(self._model)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums of these numbers over all ranks; a collective."""
        if self._model is None:
            return list(numbers)
        device = next((p.device for p in self._model.parameters()), None)
        exact = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(exact, group=self._model.process_group)
        found: list[float] = exact.tolist()
        return found

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
