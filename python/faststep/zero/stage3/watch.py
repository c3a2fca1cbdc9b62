"""What a script may do with a fully sharded model that would silently give other results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..._torch.tensors import storage_record_of
from ...grads.hooks import weakly
from ..transport.group import Group


class Watch:
    """Looks at the model before each forward, and at all ranks before each step.

    fully_shard reduces those gradients of a block that a rank has, side by side, and gathers the
    parameters of whatever block a rank calls. So ranks that use different parameters, or blocks in
    different orders, get a mixture where the sizes happen to fit.

    Args:
        model: the model, after `fully_shard`.
        blocks: those that were sharded one by one.
        optimizer: whose gradients are compared.
        group: the ranks.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], optimizer: Optimizer, group: Group
    ) -> None:
        self._optimizer = optimizer
        self._group = group
        self._params: list[tuple[str, Any]] = list(model.named_parameters())
        self._records = [storage_record_of(param) for _, param in self._params]
        self._number = {id(module): number for number, module in enumerate((model, *blocks))}
        self._order = 0  # made of the numbers of the blocks that were called since the last step
        note = weakly(self._note)
        for module in (model, *blocks):
            module.register_forward_pre_hook(note, prepend=True)

    def _note(self, module: nn.Module, *_: Any) -> None:
        number = self._number[id(module)]
        self._order = hash((self._order, number))
        if not number:
            self._refuse_ignored()

    def _refuse_ignored(self) -> None:
        """Raise RuntimeError for what has no effect with fully_shard."""
        for (name, param), record in zip(self._params, self._records, strict=True):
            if param._backward_hooks:
                raise RuntimeError(
                    f"faststep.zero: {name!r} has a hook of register_hook(), which fully_shard "
                    "does not call; register_post_accumulate_grad_hook() is called, with the mean"
                )
            if storage_record_of(param) != record:
                raise RuntimeError(
                    f"faststep.zero: {name!r} was given values by .data =, which fully_shard "
                    "ignores: use param.to_local().copy_(part), or load a state dict"
                )

    def check_step(self) -> None:
        """Raise RuntimeError on every rank if ranks differ in what they used; a collective."""
        self._refuse_ignored()
        names = {id(param): name for name, param in self._params}
        lines = [
            f"{names.get(id(param))!r} with{'out' if param.grad is None else ''} a gradient, "
            f"in group {number}"
            for number, members in enumerate(self._optimizer.param_groups)
            for param in members["params"]
        ]
        lines.append(f"called its blocks in the order with the code {self._order & 0xFFFFFFFF:x}")
        self._order = 0
        caller = (
            "faststep.zero: nothing was updated, as fully_shard adds up gradients wrongly where "
            "ranks use different parameters (model.set_reduce_scatter_unused_params(True) of newer "
            "versions of torch has it send zeros)"
        )
        self._group.check_alike(lines, caller)
