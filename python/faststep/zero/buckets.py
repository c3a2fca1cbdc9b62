"""One bucket of gradients: filled by hooks, reduced over the ranks, kept as this rank's slice."""

from __future__ import annotations

import torch
from torch import Tensor

from ..grads.add import Addition, add_all
from .group import Group, Pending
from .layout import Bucket
from .pages import Pages
from .slots import Slot
from .uses import Uses

__all__ = ["GradientBucket"]


class GradientBucket:
    """The gradients of a bucket's parameters.

    Args:
        layout: where they lie.
        slots: its parameters, in the layout's order.
        group: the ranks.
        keeps_buffer: keep the memory of whole gradients for the next backward (stage 1).
        counts_uses: learn with each reduction in how many ranks each parameter was used, by this.
    """

    def __init__(
        self,
        layout: Bucket,
        slots: list[Slot],
        group: Group,
        keeps_buffer: bool,
        counts_uses: type[Uses] | None = None,
    ) -> None:
        self.layout = layout
        self.slots = slots
        self.nbytes = layout.size * layout.dtype.itemsize
        self.missing = 0  # gradients, until the bucket can be sent
        self.is_sent = False
        self._group = group
        self._keeps_buffer = keeps_buffer
        self._counts_uses = counts_uses
        self.uses: Uses | None = None  # of the last reduction
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._way: tuple[Tensor, Pending] | None = None
        self._sent: Tensor | None = None  # that the collective reads
        self._is_added = True
        self._sums: Tensor | None = None  # of this group, on their way to those of all replicas
        self._replicating: Pending | None = None
        self._holds = False  # whether the slice has gradients of an earlier backward
        own = layout.slice_of(group.rank)
        self._slice = Pages(own.stop - own.start, layout.dtype, layout.device)
        self.values = self._slice.tensor  # of this rank's slice

    def begin(self) -> None:
        """Start a backward pass."""
        self._begin()
        if not self._holds:
            self._slice.forget()

    def _begin(self) -> None:
        self.missing = sum(slot.param.requires_grad for slot in self.slots)
        self.is_sent = False
        self._holds = any(slot.held for slot in self.slots)

    def put(self, slot: Slot, grad: Tensor, *, again: bool = False) -> None:
        """Take over a gradient of this rank, divided by the number of ranks as DDP divides it."""
        view = self._view_of(slot)
        factor = 1.0 / self._group.total
        if again:
            view.add_(grad, alpha=factor)
        else:
            torch.mul(grad, factor, out=view)

    def _view_of(self, slot: Slot) -> Tensor:
        if self._buffer is None:
            self._buffer = self._new_buffer()
            self._views = [
                self._buffer.as_strided(one.shape, one.strides, place.begin)
                for one, place in zip(self.slots, self.layout.places, strict=True)
            ]
        return self._views[slot.place]

    def _new_buffer(self) -> Tensor:
        """Memory for whole gradients, of which all but gaps is written before it is sent."""
        return Pages(self.layout.size, self.layout.dtype, self.layout.device).tensor

    def send(self) -> None:
        """Send every rank its slice; gradients that have not arrived are zero."""
        for slot in self.slots:
            if not slot.arrived:
                self._view_of(slot).zero_()
        self.is_sent, self._is_added = True, False
        if self.layout.size and self._buffer is not None:
            self._sent = self._buffer
            self._way = self._exchange(self._buffer)
        if not self._keeps_buffer:
            self._buffer, self._views = None, []
        if self._counts_uses is not None:
            what = self._what("counting the uses of")
            self.uses = self._counts_uses(self.slots, self._group, what)

    def _exchange(self, sent: Tensor) -> tuple[Tensor, Pending]:
        """Send the ranks their slices; returns where this rank's arrive, a row per rank."""
        cuts = self.layout.cuts
        sizes = [cuts[r + 1] - cuts[r] for r in range(self._group.world)]
        return self._group.exchange(sent, sizes, self._what("reducing"))

    def is_there(self) -> bool:
        """Whether `receive` would not wait; begins what follows on what has arrived."""
        waits = [self.uses, None if self._way is None else self._way[1]]
        if not self._is_added and not _are_done(waits):
            return False
        if self._group.replicas is None:
            return True
        self.add()
        return _are_done([self.uses, self._replicating])

    def lend(self) -> list[Tensor]:
        """Before another stream receives it, on a CUDA device: what must be held until then."""
        return []

    def add(self) -> None:
        """Add what the ranks have sent, in the order of the ranks, and send it to replicas."""
        if self._is_added:
            return
        self._is_added = True
        if self.uses is not None:
            self.uses.replicate()
        if self._way is None:
            return
        rows, pending = self._way
        pending.wait()
        self._way = self._sent = None
        if not self.values.numel():
            return
        sums = self._folded(rows)
        if self._group.replicas is not None:
            what = self._what("reducing over the replicas")
            self._replicating = self._group.replicas.start_adding(sums, what)
        self._sums = None if sums is self.values else sums

    def _folded(self, rows: Tensor) -> Tensor:
        """The sums of what has arrived: the slice itself, or what is to be added to it."""
        apart = self._group.replicas is not None and self._holds
        sums = torch.empty_like(self.values) if apart else self.values
        for rank in range(0, len(rows), 2):
            more = rows[rank + 1] if rank + 1 < len(rows) else None
            start = rank == 0 and (apart or not self._holds)
            add_all([Addition(sums, rows[rank], more, 1.0, start)])
        return sums

    def receive(self) -> None:
        """Wait until the slice has the gradients of all ranks."""
        self.add()
        for pending in (self.uses, self._replicating):
            if pending is not None:
                pending.wait()
        if self._sums is not None:
            self.values.add_(self._sums)
        self._replicating = self._sums = None

    def used(self) -> list[int]:
        """In how many ranks each parameter was used, once it was received."""
        assert self.uses is not None
        return self.uses.counts()

    def gather(self, flat: Tensor, tag: int) -> Pending:
        """Send this rank's slice of the parameters to the others, and receive theirs."""
        return self._group.gather(flat, self.layout.cuts, tag, self._what("gathering"))

    def _what(self, doing: str) -> str:
        first, last = self.slots[0].name, self.slots[-1].name
        return f"{doing} the parameters from {first!r} to {last!r}"


def _are_done(waits: list[Pending | Uses | None]) -> bool:
    return all(pending is None or pending.is_done() for pending in waits)
