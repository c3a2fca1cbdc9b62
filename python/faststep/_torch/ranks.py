"""The ranks of torch.distributed, how they meet, and which wrappers use them."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

_Kind = TypeVar("_Kind")


def is_distributed() -> bool:
    """True if there is a process group."""
    return bool(dist.is_available() and dist.is_initialized())


def world_size(group: Any = None) -> int:
    """The number of ranks of a process group, by default of all; 1 without torch.distributed."""
    if group is not None:
        return dist.get_world_size(group)
    return dist.get_world_size() if is_distributed() else 1


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; 0 and 1 without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def backend_for(group: Any, device_type: str) -> str:
    """The name of the backend that a process group has for a type of device; "" for none."""
    pairs = (one.partition(":") for one in dist.get_backend_config(group).split(","))
    return next((backend for device, _, backend in pairs if device == device_type), "")


def same_ranks(group: Any) -> Any:
    """A new process group of the ranks of another, with its backend and timeout; a collective.

    The other one must have all ranks. torch names a group of some ranks by how many groups each of
    them has, or needs all ranks for it.
    """
    backend = group._get_backend(torch.device("cpu"))
    kind = None if group is dist.group.WORLD else dist.get_backend(group)
    return dist.new_group(timeout=backend.options._timeout, backend=kind)


def end_group(group: Any) -> None:
    """Close the connections of a process group, if torch.distributed has not done so already."""
    if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def failed_at(group: Any, what: str, patience: float) -> dict[int, str | None]:
    """At what the ranks of a group have failed; None for those that do not call this in time.

    The store of torch.distributed, through which ranks say so, may not answer: then it is empty.

    Args:
        what: this rank has failed at.
        patience: seconds in which the others may call this too.
    """
    key = f"faststep/failed/{group.group_name}"
    found: dict[int, str | None] = dict.fromkeys(range(dist.get_world_size(group)))
    until = time.monotonic() + patience
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{key}/{dist.get_rank(group)}", what)
        while True:
            for rank, said in found.items():
                if said is None and store.check([f"{key}/{rank}"]):
                    found[rank] = store.get(f"{key}/{rank}").decode()
            if None not in found.values() or time.monotonic() > until:
                return found
            time.sleep(0.05)
    except (RuntimeError, ValueError):
        return {}


def meet(group: Any, what: str, patience: float) -> list[str | None]:
    """Meet the ranks of a group; returns the place of each, by rank. All hear the same.

    It goes through the store of torch.distributed, so the group has no message under way if a rank
    does not come. A rank that was late, or interrupted, meets the others at their next call.

    Args:
        what: this rank is at.
        patience: seconds in which the others may call this too; those that do not have None.
    """
    store = dist.distributed_c10d._get_default_store()
    me, world = dist.get_rank(group), dist.get_world_size(group)
    names = [*map(str, range(world)), "count", "said"]
    while True:
        number = store.add(f"faststep/meeting/{group.group_name}/{me}", 1)
        here = f"faststep/meeting/{group.group_name}/{number}/"
        store.set(f"{here}{me}", what)
        begun = time.monotonic()
        is_decided = False
        try:
            is_last = store.add(f"{here}count", 1) == world
            while not (is_last or (is_decided := store.check([f"{here}said"]))):
                if (waited := time.monotonic() - begun) > patience:
                    break
                time.sleep(min(max(waited / 20, 0.0002), 0.05))
        finally:  # the first one that knows the end decides it for all
            if is_decided:
                told = store.get(f"{here}said")
            else:
                found = [
                    store.get(here + name).decode() if store.check([here + name]) else None
                    for name in names[:world]
                ]
                told = store.compare_set(f"{here}said", "", json.dumps(found))
            said: list[str | None] = json.loads(told)
        if said[me] is None:
            continue  # the others have given up before this rank came
        if me == 0 and None not in said:  # nobody reads the one before any more
            for name in names:
                store.delete_key(f"faststep/meeting/{group.group_name}/{number - 1}/{name}")
        return said


def is_in_join(joinable: Any) -> bool:
    """True if torch.distributed.algorithms.Join was given this object."""
    return bool(joinable._join_config.enable)


def is_first_in_join(joinable: Any) -> bool:
    """True if Join was given this object before all others."""
    return bool(joinable._join_config.is_first_joinable)


def instances_of(kind: type[_Kind]) -> Iterator[_Kind]:
    """All living objects of a class, for wrappers that leave no mark on what they wrap.

    It looks at every object that the garbage collector knows, so ask only where a wrapper can be.
    """
    inherits = type.__subclasscheck__  # issubclass() asks an abstract class, which takes longer
    for one in gc.get_objects():
        # type() and not isinstance(): some proxies act when they are asked for their class.
        if inherits(kind, type(one)):
            yield cast("_Kind", one)
