"""One bucket of gradients on a CUDA device: reduced by NCCL, without waiting on the host.

Work is issued from torch's current stream. NCCL runs it on a stream of its own, behind what the
current one has been given. Waiting for it lets the current stream wait. The memory that a
collective reads and writes is held until a stream has waited for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch.optim import is_capturing
from .buckets import GradientBucket
from .group import Exchange, Pending

__all__ = ["CudaBucket", "refuse_capture"]


def refuse_capture() -> None:
    """Raise RuntimeError while a CUDA graph is captured: the host decides what each pass sends."""
    if is_capturing():
        raise RuntimeError(
            "faststep.zero: backward and step of a sharded model cannot be captured into a CUDA "
            "graph; capture forward and loss only, or use the optimizer without shard()"
        )


class CudaBucket(GradientBucket):
    """What GradientBucket does, on a device."""

    shares_slice = False

    def begin(self) -> None:
        """Start a backward pass."""
        refuse_capture()
        self._begin()

    def _new_buffer(self) -> Tensor:
        layout = self.layout
        return torch.empty(layout.size, dtype=layout.dtype, device=layout.device)

    def _exchange(self, sent: Tensor) -> Exchange:
        """Reduce the bucket over the ranks, and let this rank's slice of the sums come in."""
        sums = torch.empty_like(self.values) if self._holds else self.values
        pending = self._group.reduce_scatter(sums, sent, self._what("reducing"))
        return Exchange([sums], None, pending)

    def _folded(self, parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        (sums,) = parts
        return sums, None if sums is self.values else sums

    def is_there(self) -> bool:
        """False: ranks receive at the same places of their programs, whatever has arrived."""
        return False

    def lend(self, stream: torch.cuda.Stream) -> None:
        """Before another stream than that of backward receives it: keep its memory for that one."""
        for tensor in (self._sent, *(() if self._way is None else self._way.parts)):
            if tensor is not None:
                tensor.record_stream(stream)
        self._sent = None

    def gather(self, flat: Tensor, tag: int) -> Pending:
        """Send this rank's slice of the parameters to the others, and receive theirs."""
        own = flat[self.layout.slice_of(self._group.rank)]
        return self._group.gather_evenly(flat, own, self._what("gathering"))
