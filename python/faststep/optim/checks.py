"""Refusals of parts: of options in a group, and of parameters that a wrapper has divided."""

from __future__ import annotations

import sys
from typing import Any

from torch.optim import Optimizer

from .._torch.fsdp import is_fsdp_shard
from .._torch.ranks import instances_of, is_distributed
from ..grads.params import place_of
from .state_kinds import GROUP_OPTIONS

_OF_ALL_GROUPS = ("max_grad_norm", "keep_grads", "master_weights", "rounding_seed")
OPTIONS = (*_OF_ALL_GROUPS, *GROUP_OPTIONS)  # of the optimizers beside torch's arguments

_CLIP_BEFORE = (
    "as the norm of a part would be wrong, call faststep.clip_grad_norm_(model.parameters(), "
    "max_norm) before the wrapper's step()"
)
_INSTEAD = {
    "master_weights": "use faststep.zero.shard() for parts with masters",
    "rounding_seed": "do without stochastic rounding",
}


def refuse_group_options(group: dict[str, Any]) -> None:
    """Raise for options of the whole optimizer in a parameter group.

    A script may mean a note of its own. ZeroRedundancyOptimizer and others that make an optimizer
    of some of the parameters on each rank put the options that they were given there.
    """
    for name in _OF_ALL_GROUPS:
        value = group.get(name)
        if value is not None and value is not False:
            raise ValueError(
                f"{name} is an option of faststep's optimizers, for all groups together, but a "
                "parameter group has it: pass it to the optimizer, or give a value of the script's "
                "own another key. A wrapper that gives this rank's optimizer a part of the "
                "parameters (ZeroRedundancyOptimizer) puts options there too: leave "
                f"{name} away there, and {_INSTEAD.get(name, _CLIP_BEFORE)}"
            )


def refuse_part(optimizer: Optimizer) -> None:
    """Raise for an optimizer that a wrapper has given some of the parameters."""
    if _is_inside_zero(optimizer):
        raise RuntimeError(
            f"{type(optimizer).__name__}: this optimizer is that of one rank in a "
            "ZeroRedundancyOptimizer, and its step would clip by the norm of a part of the "
            "gradients: call faststep.clip_grad_norm_(model.parameters(), max_norm) before the "
            "wrapper's step(), without max_grad_norm= and max_norm=; nothing was updated"
        )


def refuse_shards(optimizer: Optimizer) -> None:
    """Raise if the norm of the gradients here would be that of one rank's part of them.

    The steps of faststep's optimizers add up the norms of the parts.
    """
    refuse_part(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if is_fsdp_shard(param):
                raise RuntimeError(
                    f"{type(optimizer).__name__}: {place_of(number, index)} is the part "
                    "of this rank (FullyShardedDataParallel), and its step would clip by the norm "
                    "of that part: use an optimizer of faststep.optim, or call "
                    "model.clip_grad_norm_(max_norm) before the step, without max_norm=; nothing "
                    "was updated"
                )


def _is_inside_zero(optimizer: Optimizer) -> bool:
    """True if a ZeroRedundancyOptimizer has made this one; it leaves no mark there.

    Looks at every object, so only scripts that can use it should pay for that: it cannot be made
    without a process group.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not is_distributed():
        return False
    zeros = instances_of(module.ZeroRedundancyOptimizer)
    return any(vars(zero).get("optim") is optimizer for zero in zeros)
