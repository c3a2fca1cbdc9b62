"""Calls of ReleaseHook, which works in backward."""

import gc
import weakref
from typing import Any

import torch

from faststep import _C

from . import hostile
from .arguments import FLOATS, Raw, junk, maybe_bad
from .functions import params_for
from .hostile import Key
from .steps import HYPER, RULES
from .world import World


class Owner:
    """Stands for an optimizer."""

    def __init__(self) -> None:
        self.state: Any = {}
        self._max_grad_norm: Any = None


def _hooks(world: World) -> list[Any]:
    """[hook, parameter, owner] of what was made before."""
    return world.objects.setdefault("ReleaseHook", [])


def hook_new(world: World) -> None:
    owner, rules = Owner(), world.contain({})
    (param,) = params_for(world, [(3,)])
    number, _, names = RULES["sgd"]
    hyper = tuple(HYPER.get(name, 0.0) for name in names)
    rules[0] = (number, (), False, hyper, False, None)
    scalars = {-1: (None, None, None)}

    def otherwise(param: Any) -> None:
        hostile.act()
        if isinstance(param, torch.Tensor) and param.grad is not None and hook is not None:
            options = (scalars, False, float("nan"), False, 0)
            hook.plan.step([[param]], [rules[0]], owner.state, None, *options)

    hook: Any = None
    args, _ = maybe_bad(world, (otherwise, weakref.ref(owner), rules, Raw(0)), good=0.8)
    hook = world.call("ReleaseHook", _C.ReleaseHook, args)
    if hook is not None:
        hook.group = world.rng.choice((0, 0, 0, 1, Key(0, True), Key(0, False), [], None))
        hook.plain, hook.clips, hook.measures = True, world.chance(0.5), world.chance(0.3)
        if world.chance(0.3):
            waiting: list[Any] = []
            limit = world.rng.choice((0, 20, 1000, -(2**63)))
            hook.together = (waiting.append, [world.rng.choice((0, 5, 2**63 - 1, None))], limit)
            hook.bytes = world.rng.choice((0, 5, 12, 2**63 - 1, -1))
        if world.chance(0.8):
            hook.last_norm = world.rng.choice((0.5, 100.0, *FLOATS))
        _hooks(world).append((hook, param, owner))
    del args, otherwise
    gc.collect(0)


def hook_call(world: World) -> None:
    if not _hooks(world):
        hook_new(world)
    if not _hooks(world):
        return
    rng = world.rng
    hook, param, owner = rng.choice(_hooks(world))
    with_grad = isinstance(param, torch.Tensor) and type(param) is torch.nn.Parameter
    if with_grad and param.device.type == "cpu" and world.chance(0.9):
        try:
            world.set_grad(param, torch.randn_like(param.detach()))
        except (RuntimeError, TypeError, NotImplementedError):
            return
    if world.chance(0.7):
        hook.updated = False
    if world.chance(0.1):
        owner._max_grad_norm = rng.choice((None, 1.0, 0.0, float("inf"), float("nan"), junk(world)))
    if world.chance(0.05):
        owner.state = junk(world)
    args, _ = maybe_bad(world, (param,), good=0.9)
    world.call("ReleaseHook.__call__", hook, args)


HOOK_ATTRIBUTES = (
    "bytes", "clips", "group", "last_norm", "measures", "plain", "plan", "square_sum", "together",
    "updated",
)  # fmt: skip


def hook_attributes(world: World) -> None:
    if not _hooks(world):
        hook_new(world)
    if not _hooks(world):
        return
    hook = world.rng.choice(_hooks(world))[0]
    name = world.rng.choice((*HOOK_ATTRIBUTES, "otherwise"))
    change = world.rng.choice(
        (
            lambda: getattr(hook, name),
            lambda: setattr(hook, name, junk(world)),
            lambda: delattr(hook, name),
        )
    )
    world.call(f"ReleaseHook.{name}", change, ())
    if world.chance(0.7):
        hook.group, hook.plain = 0, True


def tensor_error(world: World) -> None:
    args, _ = maybe_bad(world, (0, 1, "gradient", "type", "is odd"))
    world.call("TensorError", _C.TensorError, args)


BACKWARD = {
    "ReleaseHook": hook_new,
    "ReleaseHook.__call__": hook_call,
    **dict.fromkeys((f"ReleaseHook.{name}" for name in HOOK_ATTRIBUTES), hook_attributes),
    "TensorError": tensor_error,
}
