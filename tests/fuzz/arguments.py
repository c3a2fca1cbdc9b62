"""Makes good arguments bad: of another type, hostile, too many, too few, too large."""

from random import Random
from typing import Any

import torch

from . import hostile
from .hostile import Duck, Key
from .odd_tensors import any_tensor
from .world import World

INTS = (0, 1, -1, 2, 7, 63, 64, 1000, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**40, 2**62)
MORE_INTS = (2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**64), 10**30)
FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-300, 1e300, 1e39, float("nan"), float("inf"), -float("inf"))


class Raw:
    """An address, or a length that says how much lies there: the caller vouches for it."""

    def __init__(self, value: int) -> None:
        self.value = value


def odd_int(rng: Random) -> int:
    return rng.choice(INTS + MORE_INTS)


def junk(world: World) -> Any:
    """Anything."""
    rng = world.rng
    value = rng.choice(
        (
            *(None, True, "", "text", "\ud800", b"bytes", object(), int, len, [], (), {}, 1j),
            *(Duck(), Duck(-1), Duck(2**70), Duck(float("nan"))),
            *(odd_int(rng), odd_int(rng), rng.choice(FLOATS)),
            *([1.0], [None, None], (1, 2, 3), {1: 2}, [[]], ((),)),
            *(torch.Tensor, torch.float32, type("Odd", (), {"grad": None})()),
        )
    )
    if rng.random() < 0.25:
        value = any_tensor(rng)
        world.track(value)
    if rng.random() < 0.1:
        value = [any_tensor(rng), None]
        world.track(value[0])
    return value


def hostile_twin(world: World, value: Any) -> Any:
    """An equal value whose methods act."""
    if isinstance(value, bool):
        return Duck(value)
    if isinstance(value, int):
        return world.rng.choice((hostile.HostileInt, Duck))(value)
    if isinstance(value, float):
        return world.rng.choice((hostile.HostileFloat, Duck))(value)
    if isinstance(value, dict):
        twin = world.contain(hostile.HostileDict(value))
        if value and world.chance(0.5):
            dict.__setitem__(twin, Key(next(iter(value)), world.chance(0.3)), None)
        return twin
    for base, twin_type in (
        (list, hostile.HostileList),
        (tuple, hostile.HostileTuple),
        (str, hostile.HostileStr),
        (bytes, hostile.HostileBytes),
    ):
        if type(value) is base:
            twin = twin_type(value)
            return world.contain(twin) if base is list else twin
    return junk(world) if world.chance(0.2) else value


def _replaced(world: World, values: Any, index: int, depth: int) -> Any:
    """A copy of a list or tuple with a bad item."""
    items = list(type(values).__iter__(values))
    items[index] = _bad(world, items[index], depth)
    same_type = list if isinstance(values, list) else tuple
    return world.contain(items) if same_type is list else tuple(items)


def _bad(world: World, value: Any, depth: int = 0) -> Any:
    if isinstance(value, Raw):
        return Raw(value.value) if world.chance(0.5) else world.rng.choice((None, "0", 1.0, []))
    if isinstance(value, (list, tuple)) and len(value) and depth < 3 and world.chance(0.6):
        return _replaced(world, value, world.rng.randrange(len(value)), depth + 1)
    if isinstance(value, int) and not isinstance(value, bool) and world.chance(0.4):
        return odd_int(world.rng)
    if isinstance(value, float) and world.chance(0.4):
        return world.rng.choice(FLOATS)
    return hostile_twin(world, value) if world.chance(0.6) else junk(world)


def _without_raw(value: Any) -> Any:
    if isinstance(value, Raw):
        return value.value
    if type(value) is tuple:
        return tuple(_without_raw(item) for item in value)
    return value


def maybe_bad(
    world: World, args: tuple[Any, ...], good: float = 0.4
) -> tuple[tuple[Any, ...], bool]:
    """(arguments, whether they are as they were)."""
    as_they_were = world.chance(good)
    if not as_they_were:
        items = list(args)
        some = min(world.rng.choice((1, 1, 1, 2)), len(items))
        for at in world.rng.sample(range(len(items)), some):  # no address twice
            items[at] = _bad(world, items[at])
        if world.chance(0.05):
            items = items[: world.rng.randrange(len(items) + 1)]
        elif world.chance(0.03):
            items.append(junk(world))
        args = tuple(items)
    return tuple(_without_raw(arg) for arg in args), as_they_were
