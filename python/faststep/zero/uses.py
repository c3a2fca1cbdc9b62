"""How many ranks used each parameter in a backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .group import Group, Pending
from .slots import Slot

__all__ = ["CudaUses", "Uses"]


class Uses:
    """A count per slot, on its way from the ranks; beginning it is a collective.

    Args:
        slots: the parameters, in one order on all ranks.
        group: the ranks.
        what: names the collective in errors.
    """

    def __init__(self, slots: Sequence[Slot], group: Group, what: str) -> None:
        self._group = group
        self._what = what
        self._mine = [slot.arrived for slot in slots]
        self._flags = self._new_flags(slots)
        self._pending: Pending | None = group.start_adding(self._flags, what)

    def _new_flags(self, slots: Sequence[Slot]) -> torch.Tensor:
        return torch.tensor(self._mine, dtype=torch.int32)

    def is_done(self) -> bool:
        """Whether `wait` would not wait."""
        return self._pending is None or self._pending.is_done()

    def replicate(self) -> None:
        """Wait for the counts of this group, and let those of its replicas be added."""
        self.wait()
        if self._group.replicas is not None:
            what = f"{self._what}, over the replicas"
            self._pending = self._group.replicas.start_adding(self._flags, what)

    def wait(self) -> None:
        """Return when the counts are there."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def counts(self) -> list[int]:
        """In how many ranks each was used, after `wait`; at least 1 for what this rank used."""
        counts: list[int] = self._flags.tolist()
        return counts


class CudaUses(Uses):
    """The same on a CUDA device. Only a rank that left a parameter out waits for the counts."""

    def _new_flags(self, slots: Sequence[Slot]) -> torch.Tensor:
        device = slots[0].param.device
        if all(self._mine):
            return torch.ones(len(self._mine), dtype=torch.int32, device=device)
        return torch.tensor(self._mine, dtype=torch.int32, device=device)

    def counts(self) -> list[int]:
        """In how many ranks each was used, after `wait`; at least 1 for what this rank used."""
        return [1] * len(self._mine) if all(self._mine) else super().counts()
