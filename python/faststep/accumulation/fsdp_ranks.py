"""FSDP2 (fully_shard): no reduction of gradients inside a window.

Until the last micro-step the sums of whole gradients stay inside FSDP2, and `.grad` is None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from .._torch.compiler import uncompiled
from .._torch.fsdp import drop_local_grads, fsdp_modules_of, groups_of_fsdp, reduce_local_grads
from .sharded import ReducingRanks


class FullyShardedRanks(ReducingRanks):
    """The ranks of a model to which fully_shard was applied."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(None)
        self._modules = fsdp_modules_of(uncompiled(model))
        self._groups = groups_of_fsdp(self._modules)
        self._device = next((param.device for param in model.parameters()), None)

    @property
    def keeps_sums(self) -> bool:
        """True if the sums of an open window are where `.grad` does not show them."""
        return True

    @property
    def world(self) -> int:
        """How many ranks there are."""
        world = 1
        for group in self._groups:
            world *= dist.get_world_size(group)
        return world

    def set_quiet(self, quiet: bool) -> None:
        """Keep backward from reducing; False allows it again."""
        for module in self._modules:
            module.set_requires_gradient_sync(not quiet, recurse=False)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums of these numbers over all ranks; a collective."""
        exact = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        for group in self._groups:
            dist.all_reduce(exact, group=group)
        found: list[float] = exact.tolist()
        return found

    def reduce(self) -> None:
        """Reduce the sums of a window that ended early; a collective."""
        reduce_local_grads(self._modules)

    def drop(self) -> None:
        """Drop the sums of the open window."""
        drop_local_grads(self._modules)
