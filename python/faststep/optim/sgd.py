"""SGD."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .arguments import composed
from .base import FusedOptimizer
from .codes import SCALES
from .param_shards import Shards
from .request import Formula, Rule, formula


@composed
class SGD(FusedOptimizer, torch.optim.SGD):
    """:class:`torch.optim.SGD` with a step that is one C call.

    A CUDA step is two kernel launches for any number of tensors.

    Args:
        dampening (float): the gradient enters the buffer times 1 - dampening, except for the
            first time.
        weight_decay (float or Tensor): L2 penalty.
        nesterov (bool): Nesterov's look-ahead (Sutskever et al. 2013).
    """

    _formula = formula("sgd")
    _with_momentum = formula("momentum", "momentum_buffer")
    _begins_in_parts = True  # torch looks for the buffer alone
    _code_dtypes: ClassVar[Mapping[str, torch.dtype]] = {"momentum_buffer": torch.int8}

    def _formula_of(self, group: dict[str, Any]) -> Formula:
        return self._with_momentum if group["momentum"] else self._formula

    def _rules(
        self, groups: Sequence[dict[str, Any]] = (), found: list[Shards | None] | None = None
    ) -> list[Rule]:
        given = groups or self.param_groups
        for group in given:
            if type(group["nesterov"]) is not bool:  # torch takes anything that has a truth
                given = [{**group, "nesterov": bool(group["nesterov"])} for group in given]
                break
        return super()._rules(given, found)

    def _drop_new_state(self, param: Tensor) -> None:
        for key in ("momentum_buffer", SCALES):  # not there if memory ran out before
            self.state[param].pop(key, None)

    def _is_for_torch(self, group: int, index: int, *what: str) -> bool:
        state = self.state.get(self.param_groups[group]["params"][index], {})
        made_of_sparse = getattr(state.get("momentum_buffer"), "is_sparse", False)
        return made_of_sparse or super()._is_for_torch(group, index, *what)

    def _update_by_torch(self) -> None:
        for group in self.param_groups:  # before torch's loop has written the first parameter
            for param in group["params"]:
                if param.grad is not None:
                    buffer = self.state.get(param, {}).get("momentum_buffer")
                    _refuse_sums(group, param, param.grad, buffer)
        super()._update_by_torch()

    def _zeros_differ(self, group: dict[str, Any]) -> bool:
        return bool(group["dampening"] != 0)


def _refuse_sums(group: dict[str, Any], param: Tensor, grad: Tensor, buffer: Tensor | None) -> None:
    """Raise torch's error for a sum of its step that begins with a sparse tensor."""
    sums = [(grad, param)] if group["weight_decay"] != 0 else []
    if group["momentum"] != 0 and buffer is not None:
        sums += [(buffer, grad), (grad, buffer)] if group["nesterov"] else [(buffer, grad)]
    for one, other in sums:
        if one.is_sparse and not other.is_sparse:
            one.add(other)
