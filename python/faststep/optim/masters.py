"""The types of states, and fp32 masters of bf16 and fp16 parameters.

The rule updates a master, which is a state of the parameter, and the parameter receives it rounded
to the nearest. The other states are fp32 too, unless there is a `state_dtype`. Where a parameter is
not its master rounded, because a script has written it, the step begins with the parameter.

An optimizer keeps them if it is made or sharded with `master_weights`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..grads.params import params_of
from .request import Rule, Steppable
from .zeros import SMALL

MASTER = "master_weights"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_NARROW = (torch.bfloat16, torch.float16)


def keeps_masters(master_weights: object) -> bool:
    """True if the option of that name asks for masters.

    Raises:
        ValueError: it names no kind of them.
    """
    if isinstance(master_weights, (bool, str)) and master_weights in (False, True, "fp32"):
        return bool(master_weights)
    raise ValueError(f'master_weights must be True, False or "fp32", not {master_weights!r}')


def state_dtype_of(name: object) -> torch.dtype | None:
    """What an optimizer's option of that name asks for; ValueError for another one."""
    if name is None or (isinstance(name, str) and name in _DTYPES):
        return None if name is None else _DTYPES[name]
    raise ValueError(f'state_dtype must be None, "fp32" or "bf16", not {name!r}')


def warn_of_decay(optimizer: Steppable, group: dict[str, Any]) -> None:
    """Warn of bf16 states with a decay that rounding to the nearest undoes."""
    betas = group.get("betas", ())
    if optimizer._state_dtype is torch.bfloat16 and len(betas) == 2 and 0 < 1 - betas[1] < 2**-8:
        kind, last = type(optimizer).__name__, float(betas[1])
        warnings.warn(
            f'{kind}: with betas[1] = {last} and state_dtype="bf16" the second state shrinks by '
            "less per step than half the distance of two bfloat16 numbers, and so not at all: "
            "betas[1] of at most 0.996 avoids it",
            stacklevel=4,
        )


def has_master(param: Tensor) -> bool:
    """True if a parameter has one where an optimizer keeps them."""
    return param.dtype in _NARROW


def own_dtype(optimizer: Steppable, param: Tensor) -> torch.dtype:
    """The type of new states of a parameter."""
    if not param.is_floating_point():  # torch's class makes its step
        return param.dtype
    has_own = optimizer._keeps_masters and has_master(param)
    return optimizer._state_dtype or (torch.float32 if has_own else param.dtype)


@functools.cache
def with_master(keys: tuple[str, ...]) -> tuple[str, ...]:
    """The same tuple each time, by which C recognizes a step."""
    return (*keys, MASTER)


def own_keys(rule: Rule) -> tuple[str, ...]:
    """The names of the rule's states, without that of the masters."""
    return rule.state_keys[:-1] if rule.has_master else rule.state_keys


def keys_for(rule: Rule, param: Tensor) -> tuple[str, ...]:
    """The names of the states of a parameter."""
    return rule.state_keys if has_master(param) else own_keys(rule)


def begin_state(optimizer: Steppable, group: dict[str, Any], rule: Rule, param: Tensor) -> None:
    """Create the missing entries of `optimizer.state[param]`, with a master if it has one."""
    if not rule.has_master or not has_master(param):
        optimizer._new_state(group, param)
        return
    state = optimizer.state[param]
    master = state.get(MASTER)
    if master is None:
        master = param.detach().to(torch.float32, copy=True)
        if master.nbytes <= SMALL:
            master = optimizer._zeros.like(master).copy_(master)
    made = {}
    if any(state.get(key) is None for key in own_keys(rule)):
        try:  # those of an fp32 parameter
            optimizer._new_state(group, master)
            made = optimizer.state[master]
        finally:
            optimizer.state.pop(master, None)
        made = {key: value for key, value in made.items() if state.get(key) is None}
    elif rule.has_step:
        optimizer._new_state(group, param)  # moves a counter to the parameter's device
    state.pop(MASTER, None)
    state.update(made)
    state[MASTER] = master  # last, as in the rule's names


def complete_states(optimizer: Steppable) -> None:
    """Give states their masters that have none yet, and parameters that need no state an empty one.

    torch.distributed.checkpoint loads either no states at all or one of each parameter, and of
    each what was there before.
    """
    if not optimizer._keeps_masters or not optimizer.state:
        return
    for group, rule in zip(optimizer.param_groups, optimizer._rules(), strict=True):
        for param in group["params"]:
            state, keys = optimizer.state.get(param), keys_for(rule, param)
            if not keys:
                optimizer.state[param]
            elif state and [key for key in keys if key not in state] == [MASTER]:
                begin_state(optimizer, group, rule, param)


def kept_dtype(optimizer: Steppable, key: str, param: Tensor) -> torch.dtype | None:
    """The type that an entry of a state has whatever is loaded; None for that which torch gives."""
    masters = optimizer._keeps_masters and has_master(param)
    if key == "step":
        return None
    if key == MASTER or key in optimizer._numbers:
        return torch.float32 if masters else None
    return own_dtype(optimizer, param) if masters or optimizer._state_dtype is not None else None


def fitting(optimizer: Steppable, state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """A state as a step needs it: of its types, without a master where none is kept."""
    fit = {}
    for key, value in state.items():
        dtype = kept_dtype(optimizer, key, param)
        if key == MASTER and dtype is None:
            continue
        is_cast = dtype is not None and isinstance(value, Tensor) and value.is_floating_point()
        fit[key] = value.to(dtype) if is_cast else value
    return fit


def refuse_by_torch(optimizer: Steppable, reason: str) -> None:
    """Raise RuntimeError for a step by torch's operators, which know no masters nor other types."""
    kept = ""
    if optimizer._keeps_masters and any(map(has_master, params_of(optimizer))):
        kept = "masters (master_weights), which torch's operators do not know"
    elif any(own_dtype(optimizer, p) != p.dtype for p in params_of(optimizer)):
        kept = "states of a type of their own (state_dtype), which torch's operators do not take"
    if kept:
        reason = reason.removesuffix("; nothing was updated")
        raise RuntimeError(
            f"{type(optimizer).__name__} keeps {kept}, and this step needs them: {reason}; "
            "nothing was updated"
        )
