"""Gradients that are accumulated in the moments of Adam instead of in `.grad` (AdamA).

Zhang et al. 2023, arXiv:2305.19982. The first micro-gradient of a step lets the moments decay. Then
each micro-gradient g is added: m = m + (1 - beta1) g and v = v + (1 - beta2) g^2. The step updates
the parameters. m is exact: it is that of the sum of the gradients. v is an approximation: it has
the sum of the squares instead of the square of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from .._torch.modes import is_watched
from ..optim.adam import Adam, AdamW
from ..optim.base import FusedOptimizer, Rule
from ..optim.request import StepRequest
from ..optim.step import Stepper
from ..optim.work import MissingStateError, Work

__all__ = ["Moments"]


_KEYS = ("exp_avg", "exp_avg_sq")


class Moments:
    """Adam in two rules: one adds a gradient to the moments, one updates parameters from them."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        if not isinstance(optimizer, (Adam, AdamW)):
            raise TypeError(
                "accumulate_into_states=True adds gradients to the moments of Adam and AdamW; "
                f"{type(optimizer).__name__} is neither"
            )
        if optimizer._keeps_masters:
            raise TypeError("accumulate_into_states=True takes no optimizer with master_weights")
        self._numbers = optimizer._number_of
        self._stepper = Stepper()
        for group in optimizer.param_groups:
            _check(group)

    def rule(self, adam: Rule, later: bool) -> Rule:
        """The rule that adds a gradient. `later`: the moments have decayed already in this step."""
        _refuse_watched()
        _, beta1, beta2, *_ = adam.hyper
        keep = (1.0, 1.0) if later else (beta1, beta2)
        hyper = (*keep, beta1, beta2)
        return Rule(self._numbers["moments"], _KEYS, False, hyper, adam.maximize)

    def apply(self, optimizer: FusedOptimizer, params: list[Tensor]) -> None:
        """Update these parameters from their moments, and count the step."""
        if params:
            _refuse_watched()
        wanted = set(map(id, params))
        lists, rules = [], []
        for group in optimizer.param_groups:
            _check(group)
            adam = optimizer._checked_rule_of(group)
            number = self._numbers["from_moments"]
            lists.append([param for param in group["params"] if id(param) in wanted])
            rules.append(Rule(number, adam.state_keys[:3], True, adam.hyper, False, adam.lr))
        # A step takes parameters that have a gradient, which this rule does not read.
        for param in params:
            param.grad = torch.zeros((), dtype=param.dtype, device=param.device).expand_as(param)
        groups = list(range(len(lists)))
        try:
            work = Work(
                optimizer,
                lists,
                lambda: rules,
                groups,
                creates_states=False,
                unchanged="no parameter was updated",
            )
            self._stepper.step(work, StepRequest())
        except _C.TensorError as error:
            raise optimizer._explained(*error.args) from None
        except MissingStateError:
            raise RuntimeError(
                "the moments of a parameter were taken out of the optimizer's state between "
                "backward and step(); no parameter was updated"
            ) from None
        finally:
            for param in params:
                param.grad = None


def _refuse_watched() -> None:
    if is_watched():
        raise RuntimeError(
            "accumulate_into_states=True has no operators that the TorchDispatchMode around this "
            "call would see: leave the mode, or leave the option away"
        )


def _check(group: dict[str, object]) -> None:
    if group["amsgrad"] or (group["weight_decay"] and not group["decoupled_weight_decay"]):
        raise ValueError(
            "accumulate_into_states=True takes neither amsgrad nor weight decay that is added to "
            "the gradient (use AdamW, or decoupled_weight_decay=True)"
        )
