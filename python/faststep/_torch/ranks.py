"""Whether torch.distributed runs here, with how many ranks, and which wrappers use it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch.distributed as dist

__all__ = ["instances_of", "is_distributed", "rank_and_world_size", "world_size"]

_Kind = TypeVar("_Kind")


def is_distributed() -> bool:
    """Whether there is a process group."""
    return bool(dist.is_available() and dist.is_initialized())


def world_size(group: Any = None) -> int:
    """The number of ranks of a process group, by default of all; 1 without torch.distributed."""
    if group is not None:
        return dist.get_world_size(group)
    return dist.get_world_size() if is_distributed() else 1


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; 0 and 1 without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def instances_of(kind: type[_Kind]) -> Iterator[_Kind]:
    """All living objects of a class, for wrappers that leave no mark on what they wrap.

    It looks at every object that the garbage collector knows, so ask only where a wrapper can be.
    """
    for one in gc.get_objects():
        # type() and not isinstance(): some proxies act when they are asked for their class.
        if issubclass(type(one), kind):
            yield cast("_Kind", one)
