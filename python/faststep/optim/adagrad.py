"""Adagrad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .arguments import composed
from .counted import CountedOptimizer
from .masters import begin_state, ending_of, own_dtype
from .param_shards import Shards
from .request import Rule, formula
from .state_kinds import kinds_in
from .step_options import Arguments


@composed
class Adagrad(CountedOptimizer, torch.optim.Adagrad):
    """:class:`torch.optim.Adagrad` (Duchi, Hazan & Singer 2011) with a step that is one C call.

    Args:
        lr_decay (float): the learning rate is divided by 1 + (step - 1) * lr_decay.
        initial_accumulator_value (float): what the sum of squares begins with.
    """

    _formula = formula("adagrad", "step", "sum")

    def __init__(self, params: ParamsT, *args: Any, **options: Unpack[Arguments]) -> None:
        super().__init__(params, *args, **options)
        found: list[Shards | None] = []
        ending: list[Any]
        number, _, names, has_step = self._formula
        for group in self.param_groups:
            kinds = kinds_in(self, group)
            for param in group["params"]:  # torch has made the states, in the parameters' types
                if own_dtype(self, kinds, False, param, "sum") != param.dtype:
                    del self.state[param]
                    keys, *ending = ending_of(self, group, names, found)
                    rule = Rule(number, keys, has_step, (), False, None, *ending)
                    begin_state(self, group, rule, param)

    def _new_tensor(self, group: dict[str, Any], rule: Rule, param: Tensor, key: str) -> Tensor:
        new = super()._new_tensor(group, rule, param, key)
        value = self.defaults["initial_accumulator_value"]  # torch does not ask the group either
        return new.fill_(value) if value != 0 else new

    def _update_by_torch(self) -> None:
        for group in self.param_groups:  # before torch's loop has written the first parameter
            grads = (p.grad for p in group["params"] if p.grad is not None)
            if group["weight_decay"] != 0 and any(grad.is_sparse for grad in grads):
                raise RuntimeError("weight_decay option is not compatible with sparse gradients")
        super()._update_by_torch()
