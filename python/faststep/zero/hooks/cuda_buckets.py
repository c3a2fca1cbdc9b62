"""One bucket of gradients on a CUDA device: reduced by NCCL, without waiting on the host.

Work is issued from torch's current stream. NCCL runs it on a stream of its own, behind what the
current one has been given. Waiting for it lets the current stream wait. The memory that a
collective reads and writes is held until a stream has waited for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout.slots import Slot
from ..transport.group import Exchange
from ..transport.late import refuse_capture
from .gradient_buckets import GradientBucket


class CudaBucket(GradientBucket):
    """A GradientBucket on a device."""

    shares_slice = False

    def begin(self) -> None:
        """Start a backward pass."""
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
        if self._way is not None and self._sent is not None:
            for tensor in (self._sent, *self._way.parts):  # whose memory goes back to its stream
                tensor.record_stream(torch.cuda.current_stream())
        super().add()
