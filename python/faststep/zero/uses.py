"""How many ranks used each parameter in a backward pass, and on which ranks it has failed."""

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
        has_failed: whether the pass has failed on this rank.
        waits: whether this rank must know at once, on a CUDA device too.
        says: whether this rank has gradients of parameters without a slot.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        group: Group,
        what: str,
        has_failed: bool = False,
        waits: bool = False,
        says: bool = False,
    ) -> None:
        self._group = group
        self._what = what
        self._mine = [slot.arrived for slot in slots]
        self._word = has_failed + 2 * says  # each rank has a place for its own
        self._waits = waits or has_failed or not all(self._mine)
        self._flags = self._new_flags(slots)
        self._pending: Pending | None = group.start_adding(self._flags, what)

    def _new_flags(self, slots: Sequence[Slot]) -> torch.Tensor:
        words = [0] * self._group.total
        words[self._group.place] = self._word
        return torch.tensor([*self._mine, *words], dtype=torch.int32)

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
        return counts[: len(self._mine)]

    def failed(self) -> list[int]:
        """The ranks on which the pass has failed, after `wait`."""
        said = self._flags[len(self._mine) :].tolist()
        return [rank for rank, word in enumerate(said) if word & 1]

    def says_one(self) -> bool:
        """Whether a rank has gradients of parameters without a slot, after `wait`."""
        return any(word & 2 for word in self._flags[len(self._mine) :].tolist())

    def refuse_failed(self) -> None:
        """Raise RuntimeError if the pass has failed on a rank."""
        if failed := self.failed():
            who = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}"
            raise RuntimeError(
                f"faststep.zero: a backward pass has failed on {who}, whose gradients are missing: "
                "call zero_grad() on all ranks and go on with the next batch; nothing was updated"
            )

    def refuse_late(self) -> None:
        """Raise what `refuse_failed` could not know."""


class CudaUses(Uses):
    """The same on a CUDA device. Only a rank that left a parameter out waits for the counts.

    Others hear that a pass has failed before they begin the next one.
    """

    _seen: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def _new_flags(self, slots: Sequence[Slot]) -> torch.Tensor:
        device, count = self._group.device, len(self._mine)
        if self._waits:
            return super()._new_flags(slots).to(device)
        flags = torch.zeros(count + self._group.total, dtype=torch.int32, device=device)
        flags[:count] = 1
        return flags

    def counts(self) -> list[int]:
        """In how many ranks each was used, after `wait`; at least 1 for what this rank used."""
        return super().counts() if self._waits else [1] * len(self._mine)

    def says_one(self) -> bool:
        """The same, as far as this rank waits."""
        return self._waits and super().says_one()

    def refuse_failed(self) -> None:
        """Raise RuntimeError if the pass has failed on a rank; later if this one does not wait."""
        if self._waits:
            super().refuse_failed()
            return
        seen = torch.empty(self._flags.shape, dtype=torch.int32, pin_memory=True)
        seen.copy_(self._flags, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        self._seen = seen, event

    def refuse_late(self) -> None:
        """Raise what `refuse_failed` could not know."""
        if self._seen is None:
            return
        (self._flags, event), self._seen = self._seen, None
        event.synchronize()  # of a pass before the one that begins
        if self.failed():
            raise RuntimeError(
                "faststep.zero: the backward pass before this one has failed on another rank, and "
                "the step after it used the others' gradients: start again from a checkpoint"
            )
