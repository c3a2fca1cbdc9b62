"""How many ranks used each parameter in a backward pass, and on which ranks it has failed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..layout.slots import Slot
from ..transport.group import Group, listed
from ..transport.late import Late

_WHAT = "counting the parameters that were used"


class UseCounts:
    """A count per slot, on its way from the ranks; beginning it is a collective.

    On a CUDA device only a rank that left a parameter out waits for the counts. Others hear that a
    pass has failed before they begin the next one.

    Args:
        slots: the parameters, in one order on all ranks.
        group: the ranks.
        has_failed: whether the pass has failed on this rank.
        waits: whether this rank must know at once, on a CUDA device too.
        says: whether this rank has gradients of parameters without a slot.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        group: Group,
        has_failed: bool = False,
        waits: bool = False,
        says: bool = False,
    ) -> None:
        self._group = group
        self._mine = [slot.arrived for slot in slots]
        on_host = group.device.type == "cpu"
        self._waits = on_host or waits or has_failed or not all(self._mine)
        self._flags = self._new_flags(has_failed + 2 * says)
        self._late: Late | None = None  # counts that this rank has not waited for
        self._pending = group.start_adding(self._flags, _WHAT)

    def _new_flags(self, word: int) -> torch.Tensor:
        """Which parameters this rank used, and a word of each rank."""
        count, device = len(self._mine), self._group.device
        if self._waits:
            words = [0] * self._group.total
            words[self._group.place] = word
            return torch.tensor([*self._mine, *words], dtype=torch.int32).to(device)
        flags = torch.zeros(count + self._group.total, dtype=torch.int32, device=device)
        flags[:count] = 1
        return flags

    def finish(self) -> None:
        """Return when the counts of this group are there, and then those of its replicas."""
        self._pending.wait()
        if self._group.replicas is not None:
            self._group.replicas.add_up_inside(self._flags, f"{_WHAT}, over the replicas")

    def counts(self) -> list[int]:
        """In how many ranks each was used, after `finish`; at least 1 for what this rank used."""
        count = len(self._mine)
        counts: list[int] = self._flags[:count].tolist() if self._waits else [1] * count
        return counts

    def says_one(self) -> bool:
        """True if a rank has gradients of parameters without a slot, as far as this rank waits."""
        return self._waits and any(word & 2 for word in self._words(self._flags))

    def _words(self, flags: torch.Tensor) -> list[int]:
        words: list[int] = flags[len(self._mine) :].tolist()
        return words

    def refuse_failed(self) -> None:
        """Raise RuntimeError if the pass has failed on a rank; later if this one does not wait."""
        if not self._waits:
            self._late = Late(self._flags)
            return
        if failed := [rank for rank, word in enumerate(self._words(self._flags)) if word & 1]:
            raise RuntimeError(
                f"faststep.zero: a backward pass has failed on {listed(failed)}, whose gradients "
                "are missing: call zero_grad() on all ranks and go on with the next batch; nothing "
                "was updated"
            )

    def refuse_late(self) -> None:
        """Before the next pass: raise what `refuse_failed` could not know."""
        late, self._late = self._late, None
        if late is not None and any(word & 1 for word in self._words(late.read())):
            raise RuntimeError(
                "faststep.zero: the backward pass before this one has failed on another rank, and "
                "the step after it used the others' gradients: start again from a checkpoint"
            )
