"""DistributedDataParallel: silence until the end of a window, then sums over the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._torch import rebuild_buckets, uncompiled

__all__ = ["Ranks"]

_ALONE = 1 << 18  # elements from which a tensor is reduced in place, without a bucket
_BUCKET = 1 << 22  # elements


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
        elif hasattr(inner, "no_sync") or hasattr(inner, "set_requires_gradient_sync"):
            raise TypeError(
                f"accumulate() does not support {type(inner).__name__} models; it knows plain "
                "modules and DistributedDataParallel"
            )

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return 1 if self._model is None else dist.get_world_size(self._model.process_group)

    def set_quiet(self, quiet: bool) -> None:
        """Keep the model from communicating in forward and backward, or let it."""
        self._quiet.close()
        if quiet and self._model is not None:
            self._quiet.enter_context(self._model.no_sync())

    def synchronized(self) -> None:
        """The model has communicated in backward, on all ranks."""
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
        pairs, waiting = [], []  # (what is reduced, the tensors that it is a copy of)
        small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel() >= _ALONE:
                pairs.append((tensor.contiguous(), [tensor]))
            else:
                small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for alike in small.values():
            for bucket in _buckets(alike):
                pairs.append((torch.cat([tensor.reshape(-1) for tensor in bucket]), bucket))
        for values, _ in pairs:
            waiting.append(dist.all_reduce(values, group=group, async_op=True))
        for work in waiting:
            work.wait()
        for values, bucket in pairs:
            parts = torch.split(values.view(-1), [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                if part.data_ptr() != tensor.data_ptr():
                    tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Neighbours together, at most _BUCKET elements each."""
    buckets: list[list[Tensor]] = []
    size = _BUCKET
    for tensor in tensors:
        if size + tensor.numel() > _BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.numel()
    return buckets
