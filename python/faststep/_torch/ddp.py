"""What torch keeps private of backward passes and DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = [
    "after_backward",
    "is_fsdp_shard",
    "rebuild_buckets",
]


def is_fsdp_shard(tensor: torch.Tensor) -> bool:
    """Whether FullyShardedDataParallel leaves only a part of this parameter on each rank.

    FSDP2 has tensors of a class of its own (DTensor) instead.
    """
    return bool(getattr(tensor, "_fsdp_flattened", False))


def after_backward(callback: Callable[[], None]) -> None:
    """Call this at the end of the backward pass that runs; from within it only.

    Calls are made in the order in which they were asked for. Raises AttributeError where torch has
    no such list.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def rebuild_buckets(model: torch.nn.Module) -> bool:
    """Let DistributedDataParallel order its buckets now, after its first synchronized backward.

    Else it does so in the next forward: a broadcast, under no_sync() too, that waits for ranks
    which have no more data. Gradients that lie in the buckets are then elsewhere; True if so.
    """
    rebuild = getattr(getattr(model, "reducer", None), "_rebuild_buckets", None)
    return rebuild is not None and bool(rebuild())
