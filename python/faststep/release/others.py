"""What else would act on gradients that release has used by the time of the step."""

from __future__ import annotations

import gc
from typing import Any

from torch.optim import Optimizer

from .._torch.optim import has_global_pre_hooks, is_of_scheduler
from .._torch.ranks import instances_of
from ..grads.owners import releasing
from ..grads.params import params_of
from ..optim.base import FusedOptimizer

__all__ = ["refuse_code_before_step", "refuse_second_optimizer"]


def refuse_code_before_step(optimizer: FusedOptimizer, own: object) -> None:
    """Raise for code that a script runs before the update: it would find no gradients to change.

    Args:
        optimizer: the one that is released.
        own: the key of the pre-hook that release has set itself; None before it has.
    """
    what = _code_before_step(optimizer, own)
    if what is not None:
        raise RuntimeError(
            f"{type(optimizer).__name__}: release_gradients() updates parameters in backward, so "
            f"{what} would find no gradients. Change gradients by param.register_hook(), which "
            "runs before the update, or remove() the release"
        )


def _code_before_step(optimizer: FusedOptimizer, own: object) -> str | None:
    if any(key != own for key in optimizer._optimizer_step_pre_hooks):
        return "the hook of register_step_pre_hook()"
    if has_global_pre_hooks():
        return "the hook of register_optimizer_step_pre_hook()"
    step = vars(optimizer).get("step")
    if step is not None and not is_of_scheduler(step, type(optimizer).step):
        return "the step that was set on the optimizer"
    if optimizer._has_own_step() or optimizer._steps_by_script():
        return "a step that is not faststep's"
    return None


def refuse_second_optimizer(optimizer: FusedOptimizer) -> None:
    """Raise if another optimizer has one of the parameters: it would find no gradient."""
    if others := _others(optimizer):
        gc.collect()  # one that a script has dropped may wait for this
        others = _others(optimizer)
    if others:
        raise RuntimeError(
            f"a {type(others[0]).__name__} has parameters of this {type(optimizer).__name__}: with "
            "release_gradients() it would find no gradients. Give each parameter to one optimizer, "
            "and delete those that are not used"
        )


def _others(optimizer: FusedOptimizer) -> list[Any]:
    """Optimizers with some of the parameters, but no wrappers of this one."""
    ours = set(map(id, params_of(optimizer)))
    found = [*releasing.having(params_of(optimizer)), *instances_of(Optimizer)]
    return [
        other
        for other in found
        if other is not optimizer
        and optimizer not in vars(other).values()
        and vars(other).get("param_groups") is not optimizer.param_groups
        and any(id(param) in ours for param in _params(other))
    ]


def _params(optimizer: Optimizer) -> list[Any]:
    groups = vars(optimizer).get("param_groups", ())  # a wrapper may have none of its own
    return [param for group in groups for param in group["params"]]
