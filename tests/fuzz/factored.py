"""Calls of factored_step, on parameters, gradients and states of all kinds."""

from __future__ import annotations

from typing import Any

import torch

from faststep import _C

from .arguments import FLOATS, maybe_bad
from .functions import gradients_of, params_for
from .odd_tensors import any_tensor
from .world import World

NUMBERS = (0.01, -0.8, 1e-7, 1e-3, 1.0, 0.1)


def _states_of(world: World, param: torch.Tensor) -> dict[str, Any]:
    """What a parameter's states are, but for one of them now and then."""
    shape, dtype = tuple(param.shape), param.dtype
    states: dict[str, Any] = {"step": torch.tensor(world.rng.choice((0.0, 1.0, 7.0)))}
    if len(shape) > 1:
        states["row_var"] = torch.zeros((*shape[:-1], 1), dtype=dtype)
        states["col_var"] = torch.zeros((*shape[:-2], 1, shape[-1]), dtype=dtype)
    else:
        states["variance"] = torch.zeros(shape, dtype=dtype)
    if world.chance(0.1):
        key = world.rng.choice(list(states))
        states[key] = any_tensor(world.rng)
        if world.chance(0.3):
            del states[key]
    for value in states.values():
        world.track(value)
    return states


def factored_step(world: World) -> None:
    rng = world.rng
    groups, state = [], {}
    for _ in range(rng.choice((1, 1, 2))):
        params = params_for(world)
        for param in params if type(params) is list else ():
            if isinstance(param, torch.Tensor) and world.chance(0.97):
                state[param] = _states_of(world, param) if world.chance(0.97) else {}
        numbers = [rng.choice(FLOATS) if world.chance(0.05) else number for number in NUMBERS]
        groups.append((params, *numbers, world.chance(0.2)))
    args, _ = maybe_bad(world, (tuple(groups), state))
    kept = [
        p for params, *_ in groups for p in list.__iter__(params) if isinstance(p, torch.Tensor)
    ]
    kept += gradients_of(kept) if world.chance(0.3) else []
    kept += [value for row in state.values() for value in row.values()]
    world.call(
        "factored_step",
        _C.factored_step,
        args,
        kept=kept,
        nothing_done=lambda result: bool(result[0] or result[1]),
    )


FACTORED = {"factored_step": factored_step}
