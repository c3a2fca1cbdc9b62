"""What hostile objects do while the extension runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from faststep import _C

from .hostile import BareBoomError, BoomError
from .odd_tensors import new_type, packed

if TYPE_CHECKING:
    from .world import World

MOST_DEPTH = 2  # calls of the extension inside a call


def raise_an_error(world: World) -> None:
    raise world.rng.choice(
        (BoomError, BoomError, BareBoomError, KeyError, IndexError, StopIteration, MemoryError)
    )


def clear_a_container(world: World) -> None:
    if world.containers:
        container = world.rng.choice(world.containers)
        (dict if isinstance(container, dict) else list).clear(container)


def shorten_a_list(world: World) -> None:
    lists = [c for c in world.containers if isinstance(c, list) and list.__len__(c)]
    if lists:
        list.pop(world.rng.choice(lists))


def lengthen_a_list(world: World) -> None:
    lists = [c for c in world.containers if isinstance(c, list)]
    if lists:
        chosen = world.rng.choice(lists)
        count = list.__len__(chosen)
        more = list.__getitem__(chosen, 0) if count else None
        list.extend(chosen, [more] * world.rng.choice((1, 3, 100)))


def grow_a_dictionary(world: World) -> None:
    dicts = [c for c in world.containers if isinstance(c, dict)]
    if dicts:
        chosen = world.rng.choice(dicts)
        for i in range(world.rng.choice((1, 50))):
            dict.__setitem__(chosen, f"more {i}", i)


ON_LISTS = (clear_a_container, shorten_a_list, lengthen_a_list)


def drop_gradients(world: World) -> None:
    world.touched = True
    for ref in world.params:
        param = ref()
        if param is not None and world.chance(0.7):
            world.set_grad(param, None)


def replace_gradients(world: World) -> None:
    world.touched = True
    for ref in world.params:
        param = ref()
        if param is not None and world.chance(0.5):
            try:
                world.set_grad(param, torch.full_like(param, 2.0))
            except (RuntimeError, TypeError, NotImplementedError, AttributeError):
                continue


def move_storages(world: World) -> None:
    world.touched = True
    for ref in world.params + world.tracked[-4:]:
        tensor = ref()
        if tensor is None or not world.chance(0.5):
            continue
        try:
            moved = tensor if world.chance(0.5) else tensor.grad
            if moved is not None and moved.untyped_storage().nbytes():
                moved.data = moved.detach().clone()
        except (RuntimeError, TypeError, NotImplementedError, AttributeError):
            continue


def write_over_freed_memory(world: World) -> None:
    kept = [torch.full((n,), 1e30) for n in (1, 3, 3, 17, 35, 300) * 4]
    tuples = [(None,) * n for n in range(1, 12)] + [[None] * n for n in range(1, 12)]
    del kept, tuples


def collect_garbage(world: World) -> None:
    gc.collect(0 if world.chance(0.8) else 2)


def let_others_run(world: World) -> None:
    time.sleep(0)


def meet_new_types(world: World) -> None:
    for _ in range(world.rng.choice((1, 20))):
        _C.fusable([packed(world.rng, (2,)).as_subclass(new_type())])


def forget_or_close(world: World) -> None:
    for several in world.objects.values():
        for one in several:
            for method in ("forget", "close"):
                if hasattr(one, method) and world.chance(0.5):
                    try:
                        getattr(one, method)()
                    except RuntimeError:
                        continue


def call_again(world: World) -> None:
    if world.again and world.depth <= MOST_DEPTH:
        world.touched = True
        world.again(world)
        world.touched = True


ON_GRADIENTS = (drop_gradients, replace_gradients, move_storages)

EFFECTS: list[Callable[[World], None]] = [
    raise_an_error,
    raise_an_error,
    clear_a_container,
    shorten_a_list,
    lengthen_a_list,
    grow_a_dictionary,
    drop_gradients,
    replace_gradients,
    move_storages,
    write_over_freed_memory,
    write_over_freed_memory,
    collect_garbage,
    let_others_run,
    meet_new_types,
    forget_or_close,
    call_again,
    call_again,
]
