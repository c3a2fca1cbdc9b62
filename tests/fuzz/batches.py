"""Calls of Slots, Gather and Arena, in odd orders and with hostile arguments."""

import os
from typing import Any

import torch

from faststep import _C

from . import hostile
from .arguments import Raw, junk, maybe_bad, odd_int
from .odd_tensors import any_tensor
from .world import FaultError, World


def _some(world: World, kind: str, make: Any) -> Any:
    some = world.objects.setdefault(kind, [])
    if not some or (len(some) < 3 and world.chance(0.2)):
        some.append(make())
    return world.rng.choice(some)


def _keep(world: World, tensor: Any) -> None:
    """For a while, in one of few places: the memory is used again when it is replaced."""
    kept = world.objects.setdefault("tensors", [None] * 4)
    kept[world.rng.randrange(4)] = tensor


def _write(tensors: Any) -> None:
    """Writes to every element: memory that is not there is a crash."""
    for tensor in tensors if isinstance(tensors, list) else [tensors]:
        small = isinstance(tensor, torch.Tensor) and tensor.numel() < 1 << 20
        if small and tensor.stride() and 0 not in tensor.stride():
            tensor.zero_()


def slots_new(world: World) -> None:
    world.call("Slots", _C.Slots, () if world.chance(0.7) else (junk(world),))


def slots_counts(world: World) -> None:
    world.call("Slots.counts", _some(world, "Slots", _C.Slots).counts, ())


def slots_keep(world: World) -> None:
    args, _ = maybe_bad(world, (world.rng.choice((0, 1, 3)),))
    world.call("Slots.keep", _some(world, "Slots", _C.Slots).keep, args)


def _like(world: World) -> torch.Tensor:
    rng = world.rng
    if world.chance(0.2):
        return any_tensor(rng)
    like = torch.empty((rng.choice((0, 1, 4)), *rng.choice(((), (4,), (3, 2, 5)))))
    if world.chance(0.3):
        strides = [rng.choice((0, 1, 2, 7, 10**6, 2**40)) for _ in like.shape]
        like = torch.empty(0, *like.shape[1:]).as_strided((0, *like.shape[1:]), strides)
    return like


def slots_empty(world: World) -> None:
    rng = world.rng
    rows = rng.choice((0, 1, 7, 7, 2**31, 2**60, 2**62, -1))
    args, _ = maybe_bad(world, (world.track(_like(world)), rows))
    tensor = world.call("Slots.empty", _some(world, "Slots", _C.Slots).empty, args)
    _write(tensor)
    _keep(world, tensor)


class Gathering:
    """A Gather over arrays of its own."""

    def __init__(self, world: World) -> None:
        rng = world.rng
        self.data = torch.randn(9, 4)
        self.labels = torch.arange(9.0)
        self.chosen = torch.tensor([3, 8, -1, 0])
        fields = ((torch.empty(0, 4), 0), (torch.empty(0), 0))
        columns = ((Raw(self.data.data_ptr()), Raw(16)), (Raw(self.labels.data_ptr()), Raw(4)))
        nodes: tuple[Any, ...] = ((0, Raw(9), columns),)
        self.length = 9
        shape = rng.randrange(4)
        if shape == 1:
            nodes += ((1, 0, Raw(4), Raw(self.chosen.data_ptr()), 0, 0),)
            self.length = 4
        if shape == 2:
            start, step = rng.choice(((0, 1), (8, -2), (2, 3), (odd_int(rng), odd_int(rng))))
            nodes += ((1, 0, 3, Raw(0), start, step),)
            self.length = 3
        if shape == 3:
            nodes += ((2, rng.choice(((0,), (0, 0), ()))),)
            self.length = 9 * len(nodes[-1][1])
        slots = _some(world, "Slots", _C.Slots)
        threads = rng.choice((0, 0, 1, 2, 64))
        right = (slots, fields, nodes, threads, world.chance(0.5), (self.data, self.labels))
        args, self.good = maybe_bad(world, right, good=0.8)
        self.gather = world.call("Gather", _C.Gather, args)
        self.batches: list[Any] = []


def _gathering(world: World) -> Any:
    some = world.objects.setdefault("Gathering", [])
    if not some or (len(some) < 3 and world.chance(0.1)):
        made = Gathering(world)
        if made.gather is None:
            return None
        some.append(made)
        world.objects.setdefault("Gather", []).append(made.gather)
    return world.rng.choice(some)


def gather_new(world: World) -> None:
    Gathering(world)


def gather_submit(world: World) -> None:
    rng = world.rng
    own = _gathering(world)
    if own is None:
        return
    indices: Any = [rng.randrange(-9, 9) for _ in range(rng.choice((0, 1, 3, 100)))]
    if world.chance(0.1):
        indices.append(odd_int(rng))
    count = len(indices)
    if world.chance(0.4):
        try:
            indices = world.track(torch.tensor(indices, dtype=torch.int64))
        except (RuntimeError, OverflowError, ValueError):
            return
    args: tuple[Any, ...] = (indices,)
    if world.chance(0.4):
        args = (indices, 0, -1)
        if world.chance(0.3):
            args = (indices, odd_int(rng), odd_int(rng))
        if world.chance(0.5):
            outputs = (torch.zeros(count, 4), torch.zeros(count))
            kind = rng.choice((tuple, tuple, hostile.HostileTuple))
            args = (*args, kind(world.track(out) for out in outputs))
    args, _ = maybe_bad(world, args, good=0.6)
    batch = world.call("Gather.submit", own.gather.submit, args)
    if isinstance(batch, _C.Batch):
        own.batches.append(batch)


def batch_new(world: World) -> None:
    world.call("Batch", _C.Batch, () if world.chance(0.7) else (junk(world),))


def batch_take(world: World) -> None:
    own = _gathering(world)
    if own is None or not own.batches:
        return
    batch = world.rng.choice(own.batches)
    if world.chance(0.3):
        own.batches.remove(batch)
    args, good = maybe_bad(world, (), good=0.9)
    result = world.call("Batch.take", batch.take, args)
    if isinstance(result, list) and good and own.good and not world.touched:
        if len(result) != 2 and not world.threaded:
            raise FaultError(f"Batch.take gave {len(result)} fields")
        _write(result)
    _keep(world, result)


def gather_close(world: World) -> None:
    own = _gathering(world)
    if own is not None and world.chance(0.3):
        world.call("Gather.close", own.gather.close, ())
        if world.chance(0.7):
            world.objects["Gathering"] = [o for o in world.objects["Gathering"] if o is not own]


def arena_new(world: World) -> None:
    rng = world.rng
    if world.chance(0.5):
        world.call("Arena", _C.Arena, ())
    elif world.chance(0.5):
        arena = _some(world, "Arena", _C.Arena)
        world.call("Arena", _C.Arena, (os.dup(arena.fileno()), arena.reserve()))
    else:
        # never the number of a file that is open: the arena would own it
        args = rng.choice(((-1, 5), (-1,), (10**6, 5), (2**31, 1), (10**6, odd_int(rng)), ("a", 1)))
        world.call("Arena", _C.Arena, args)


def _arena(world: World) -> Any:
    return _some(world, "Arena", _C.Arena)


def _block(world: World) -> Any:
    blocks = world.objects.get("blocks") or [0]
    return world.rng.choice(blocks) if world.chance(0.8) else odd_int(world.rng)


def arena_take(world: World) -> None:
    size = world.rng.choice((0, 1, 100, 5000, 10**6, 2**62, 2**64 - 1))
    args, _ = maybe_bad(world, (size,))
    if args and isinstance(args[0], int) and 10**7 < int.__int__(args[0]) < 2**50:
        return  # so much memory there may be, and to take it is slow
    result = world.call("Arena.take", _arena(world).take, args)
    if result is not None:
        world.objects.setdefault("blocks", []).append(result[0])
        _write(result[1])
        _keep(world, result[1])


def arena_put(world: World) -> None:
    data = torch.ones(100)
    args, _ = maybe_bad(world, (Raw(data.data_ptr()), Raw(world.rng.choice((0, 1, 400)))))
    block = world.call("Arena.put", _arena(world).put, args)
    if block is not None:
        world.objects.setdefault("blocks", []).append(block)
    del data


def arena_hold(world: World) -> None:
    args, _ = maybe_bad(world, (_block(world), world.rng.choice((0, 1, 100, 400, 5000, 2**40))))
    tensor = world.call("Arena.hold", _arena(world).hold, args)
    _write(tensor)
    _keep(world, tensor)


def arena_locked(world: World) -> None:
    address = world.rng.choice((0, 1, 4096, odd_int(world.rng)))
    args, _ = maybe_bad(world, (address, world.rng.choice((0, 1, 400, odd_int(world.rng)))))
    world.call("Arena.locked", _arena(world).locked, args)


def arena_locks(world: World) -> None:
    args, _ = maybe_bad(world, (world.rng.choice((0, -1, 63, 64)),))
    world.call("Arena.prepare_locks", _arena(world).prepare_locks, args)


def of_block(name: str) -> Any:
    def target(world: World) -> None:
        args, _ = maybe_bad(world, (_block(world),))
        world.call(f"Arena.{name}", getattr(_arena(world), name), args)

    return target


def of_arena(name: str) -> Any:
    def target(world: World) -> None:
        args = () if world.chance(0.8) else (junk(world),)
        world.call(f"Arena.{name}", getattr(_arena(world), name), args)

    return target


BATCHES = {
    "Arena": arena_new,
    "Arena.hold": arena_hold,
    "Arena.locked": arena_locked,
    "Arena.prepare_locks": arena_locks,
    "Arena.put": arena_put,
    "Arena.take": arena_take,
    **{f"Arena.{name}": of_block(name) for name in ("give_back", "send", "sent", "unpin")},
    **{f"Arena.{name}": of_arena(name) for name in ("counts", "fileno", "pin", "reserve", "sweep")},
    "Batch": batch_new,
    "Batch.take": batch_take,
    "Gather": gather_new,
    "Gather.close": gather_close,
    "Gather.submit": gather_submit,
    "Slots": slots_new,
    "Slots.counts": slots_counts,
    "Slots.empty": slots_empty,
    "Slots.keep": slots_keep,
}
