"""A bucket: its gradients are filled in by hooks, reduced over the ranks, and kept as this rank's
slice; its parameters are gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._torch.optim import increment_version
from ...grads.add import Addition, add_alike
from ..layout.cuts import Bucket
from ..layout.flat_params import FlatParams
from ..layout.pages import BufferPool, Pages
from ..layout.slots import Part, Slot
from ..transport.group import Exchange, Group, Pending, refuse_capture


class GradientBucket:
    """Parameters in one piece of CPU memory, and their gradients.

    Args:
        layout: where they lie, in the order of the slots.
        pool: memory of what arrives, that all buckets share.
        keeps_buffer: keep the memory of whole gradients for the next backward (stage 1). The slice
            is a part of it.
        sums: the dtype of the slice. What ranks send has that of the parameters.
    """

    shares_slice = True  # whether the slice may be a part of the buffer

    def __init__(
        self,
        layout: Bucket,
        slots: list[Slot],
        group: Group,
        pool: BufferPool,
        keeps_buffer: bool,
        sums: torch.dtype,
    ) -> None:
        self.layout = layout
        self.slots = slots
        self.nbytes = layout.size * layout.dtype.itemsize
        self.missing = 0  # gradients, until the bucket can be sent
        self._group = group
        self._pool = pool
        self._keeps_buffer = keeps_buffer
        self._buffer: Tensor | None = None
        self._way: Exchange | None = None  # from `send` to `add`
        self._sums: Tensor | None = None  # of this group, on their way to those of all replicas
        self._replicating: Pending | None = None
        self._earlier: Tensor | None = None  # of the slice, while its memory is needed
        self._slice: Pages | None = None  # memory of its own
        self._is_wide = sums != layout.dtype
        if keeps_buffer and self.shares_slice and not self._is_wide:
            self.values = self._whole()[layout.slice_of(group.rank)]  # of this rank's slice
        else:
            self._slice = Pages(layout.part, sums, group.device)
            self.values = self._slice.tensor
        self.params = FlatParams(layout, slots, group.device)
        for place, begin, count, at in layout.pieces_of(group.rank):
            grad = self.values[at - layout.part * group.rank :][:count]
            values = self.params.piece(at, count)
            values.grad_dtype = sums
            slots[place].part = Part(values, grad, begin)

    def begin(self) -> None:
        self.missing = sum(slot.param.requires_grad for slot in self.slots)
        if self._slice is None:
            self._earlier = self.values.clone() if self._holds else None
        elif not self._holds:
            self._slice.forget()

    @property
    def _holds(self) -> bool:
        """True if the slice has gradients of an earlier backward."""
        return any(slot.held for slot in self.slots)

    def drop(self) -> None:
        """Let go of all gradients."""
        self._earlier = self._sums = None
        if self._slice is None:
            self.values.zero_()
        else:
            self._slice.forget()

    def put(self, slot: Slot, grad: Tensor, *, again: bool = False) -> None:
        """Take over a gradient of this rank, divided by the number of ranks as DDP divides it."""
        view = self._view_of(slot)
        factor = 1.0 / self._group.total
        if again:
            view.add_(grad, alpha=factor)
        else:
            torch.mul(grad, factor, out=view)

    def _view_of(self, slot: Slot) -> Tensor:
        begin = self.layout.places[slot.place].begin
        return self._whole().as_strided(slot.shape, slot.strides, begin)

    def _whole(self) -> Tensor:
        if self._buffer is None:
            self._buffer = self._new_buffer()
        return self._buffer

    def _new_buffer(self) -> Tensor:
        """Memory for whole gradients. All but gaps is written before it is sent."""
        return Pages(self.layout.size, self.layout.dtype, self._group.device).tensor

    def send(self) -> None:
        """Send every rank its slice; gradients that have not arrived are zero."""
        for slot in self.slots:
            if not slot.arrived:
                self._view_of(slot).zero_()
        if self.layout.size:
            self._way = self._exchange(self._whole(), self._what("reducing"))
        if not self._keeps_buffer:
            self._buffer = None

    def _exchange(self, sent: Tensor, what: str) -> Exchange:
        """Send the ranks their slices, and let this rank's come in."""
        return self._group.exchange(sent, self._pool, what)

    def is_there(self) -> bool:
        """True if `receive` would not wait; begins what follows on what has arrived."""
        if self._way is not None and not self._way.pending.is_done():
            return False
        if self._group.replicas is not None:
            self.add()
        return self._replicating is None or self._replicating.is_done()

    def add(self) -> None:
        """Add what the ranks have sent, in the order of the ranks, and send it to replicas."""
        if self._way is None:
            return
        way, self._way = self._way, None
        way.pending.wait()
        sums, self._sums = self._folded(way.parts)
        if self._group.replicas is not None:
            what = self._what("reducing over the replicas")
            self._replicating = self._group.replicas.start_adding(sums, what)
        if way.block is not None:
            self._pool.give_back(way.block)

    def _folded(self, parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Add the ranks' parts of the slice, two at a time.

        Returns their sums, and what is added to the slice after replicas have added theirs. The own
        part may be the slice itself, and then comes first: of two it makes no difference.
        """
        earlier, self._earlier = self._earlier, None
        total, later = self.values, None
        fresh = self._group.replicas is not None or not self._holds
        if self._is_wide and self._group.replicas is not None:
            total = later = torch.empty_like(self.values, dtype=self.layout.dtype)
        elif not fresh and earlier is not None:
            total = earlier
        elif fresh and self._holds:
            later = torch.empty_like(self.values) if earlier is None else earlier
            total = later if earlier is None else self.values
        if fresh and self._group.leaves_out_own and self._group.rank == 1:
            parts = parts[::-1]
        for rank in range(0, len(parts), 2):
            more = parts[rank + 1] if rank + 1 < len(parts) else None
            add_alike([Addition(total, parts[rank], more, 1.0, fresh and rank == 0)])
        if total is earlier:
            self.values.copy_(total)
        return total, later

    def receive(self) -> None:
        """Wait until the slice has the gradients of all ranks."""
        self.add()
        if self._replicating is not None:
            self._replicating.wait()
        if self._sums is not None:
            self.values.add_(self._sums)
        self._replicating = self._sums = None
        increment_version([self.values])  # collectives do not

    def gather(self, tag: int) -> Pending:
        """Send this rank's slice of the parameters to the others, and receive theirs."""
        return self._group.gather(self.params.flat, tag, self._what("gathering"))

    def _what(self, doing: str) -> str:
        first, last = self.slots[0].name, self.slots[-1].name
        return f"{doing} the parameters from {first!r} to {last!r}"


class CudaBucket(GradientBucket):
    """A GradientBucket on a CUDA device: reduced by NCCL, without waiting on the host.

    Work is issued from torch's current stream. NCCL runs it on a stream of its own, behind what the
    current one has been given. Waiting for it lets the current stream wait. The memory that a
    collective reads and writes is held until a stream has waited for it.
    """

    shares_slice = False

    def begin(self) -> None:
        refuse_capture()
        self._streams: list[torch.cuda.Stream] = []  # that gradients have come from
        super().begin()

    def put(self, slot: Slot, grad: Tensor, *, again: bool = False) -> None:
        """Take over a gradient of this rank, on the stream on which backward has made it."""
        super().put(slot, grad, again=again)
        here = torch.cuda.current_stream()
        if here not in self._streams:
            self._streams.append(here)

    def _new_buffer(self) -> Tensor:
        layout = self.layout
        return torch.empty(layout.size, dtype=layout.dtype, device=self._group.device)

    def _exchange(self, sent: Tensor, what: str) -> Exchange:
        """Reduce the bucket over the ranks, and let this rank's slice of the sums come in."""
        apart = self._holds or self._is_wide
        sums = torch.empty_like(self.values, dtype=sent.dtype) if apart else self.values
        pending = self._group.reduce_scatter(sums, sent, what)
        return Exchange([sums], None, pending)

    def _folded(self, parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        (sums,) = parts
        return sums, None if sums is self.values else sums

    def is_there(self) -> bool:
        """False: ranks receive at the same places of their programs, whatever has arrived."""
        return False

    def send(self) -> None:
        """Reduce it over the ranks, behind whatever stream a gradient came from."""
        here = torch.cuda.current_stream()
        for stream in self._streams:
            if stream != here:
                here.wait_stream(stream)
        self._streams = []
        super().send()

    def add(self) -> None:
        """Let the current stream wait for the sums, and send them to replicas."""
        if self._way is not None:
            for tensor in self._way.pending.kept:  # whose memory goes back to its stream
                tensor.record_stream(torch.cuda.current_stream())
        super().add()
