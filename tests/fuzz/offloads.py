"""Calls of Offload, whose threads copy and update what it was told of."""

from typing import Any

import torch

from faststep import _C

from .arguments import FLOATS, junk, maybe_bad, odd_int
from .odd_tensors import any_tensor
from .steps import HYPER, RULES
from .world import World


def _pipe(world: World) -> Any:
    """One of a few, with parameters; all their memory stays."""
    made = world.objects.setdefault("OffloadPipe", [])
    if not made:
        made.append(_C.OffloadPipe(2, 1))
        made[0].set([_tensors() for _ in range(3)])
    return world.rng.choice(made)


def _tensors() -> tuple[torch.Tensor, ...]:
    param, values, grad = (torch.ones(50) for _ in range(3))
    values.grad = grad
    return param, values, grad, torch.zeros(1, dtype=torch.float64)


def offload_new(world: World) -> None:
    args, _ = maybe_bad(world, (world.rng.choice((0, 1, 2, 300)), odd_int(world.rng)))
    made = world.call("OffloadPipe", _C.OffloadPipe, args)
    if made is not None and len(world.objects.setdefault("OffloadPipe", [])) < 4:
        world.objects["OffloadPipe"].append(made)


def offload_set(world: World) -> None:
    tuples: list[Any] = [_tensors() for _ in range(world.rng.choice((0, 1, 3)))]
    if tuples and world.chance(0.3):
        tuples[0] = (*tuples[0][:2], any_tensor(world.rng), tuples[0][3])
    if tuples and world.chance(0.1):
        tuples[-1] = junk(world)
    where = () if world.chance(0.8) else (world.rng.choice((-1, 64, 2**31, -2)), 0)
    args, _ = maybe_bad(world, (tuples, *where))
    world.call("OffloadPipe.set", _pipe(world).set, args)


def offload_arrive(world: World) -> None:
    grad = torch.ones(50) if world.chance(0.8) else any_tensor(world.rng)
    args, _ = maybe_bad(world, (world.rng.choice((0, 1, 5, -1)), grad, world.rng.choice(FLOATS)))
    world.call("OffloadPipe.arrive", _pipe(world).arrive, args)


def offload_wait(world: World) -> None:
    args = () if world.chance(0.5) else (world.rng.choice((0, 1, 2, -1, -2, 99)),)
    world.call("OffloadPipe.wait", _pipe(world).wait, args)


def offload_pace(world: World) -> None:
    args, _ = maybe_bad(world, (world.rng.choice((0.0, 1e9, -1.0)), 1e9))
    world.call("OffloadPipe.pace", _pipe(world).pace, args)


def offload_plain(world: World) -> None:
    name = world.rng.choice(("begin", "busy", "settle"))
    args = () if world.chance(0.8) else (junk(world),)
    world.call(f"OffloadPipe.{name}", getattr(_pipe(world), name), args)


def plan_offload(world: World) -> None:
    """A plan whose parameters are those of an OffloadPipe, and one that is given anything."""
    args, _ = maybe_bad(world, (_C.OffloadPipe(1, 1),))
    world.call("Plan.offload", _C.Plan().offload, args)
    pipe, plan, tensors = _C.OffloadPipe(1, 1), _C.Plan(), _tensors()
    pipe.set([tensors])
    plan.offload(pipe)
    if world.chance(0.8):
        pipe.arrive(0, torch.ones(50), 1.0)
    number, _, names = RULES["sgd"]
    rule = (number, (), False, tuple(HYPER.get(name, 0.0) for name in names), False, None)
    options = ({-1: (None, None, None)}, False, float("nan"), False, 0)
    world.call("Plan.step", plan.step, ([[tensors[1]]], [rule], {}, None, *options))
    pipe.wait()


OFFLOADS = {
    "OffloadPipe": offload_new,
    "OffloadPipe.arrive": offload_arrive,
    **dict.fromkeys(("OffloadPipe.begin", "OffloadPipe.busy", "OffloadPipe.settle"), offload_plain),
    "OffloadPipe.pace": offload_pace,
    "OffloadPipe.set": offload_set,
    "OffloadPipe.wait": offload_wait,
    "Plan.offload": plan_offload,
}
