"""The copies between a CUDA device and the host, each direction on a stream of its own.

Only events order them with the script's streams: the host waits nowhere here.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Link:
    """Two streams of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ingoing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._outgoing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def handle(self) -> int:
        """The stream on which parameters go back, for C."""
        return int(self._outgoing.cuda_stream)

    def lend(self, param: Tensor) -> None:
        """Let the device use a parameter's memory for nothing else before it was copied back."""
        param.record_stream(self._outgoing)

    def fetch(self, grad: Tensor, room: Tensor) -> torch.cuda.Event:
        """Begin to copy a gradient of the current stream; returns the event behind the copy."""
        current = torch.cuda.current_stream(self.device)
        grad = grad.detach()
        if grad.stride() != room.stride() or grad.is_neg():
            grad = torch.empty_like(room, device=self.device).copy_(grad)
        self._ingoing.wait_stream(current)
        with torch.cuda.stream(self._ingoing):
            room.copy_(grad, non_blocking=True)
        grad.record_stream(self._ingoing)  # a script may let go of it
        # a thread waits for it, and would spin
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._ingoing)
        return event

    def send(self, values: Tensor, to: Tensor) -> None:
        """Begin to copy a tensor back, behind what `follow` was called behind."""
        with torch.cuda.stream(self._outgoing):
            to.copy_(values, non_blocking=True)
        to.record_stream(self._outgoing)

    def follow(self) -> None:
        """Let copies back come behind the work of the current stream, which may read parameters."""
        self._outgoing.wait_stream(torch.cuda.current_stream(self.device))

    def join(self) -> None:
        """Let the current stream go on behind all copies."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._ingoing)
        current.wait_stream(self._outgoing)

    def synchronize(self) -> None:
        """Wait for all copies: memory of the host is about to be freed."""
        self._ingoing.synchronize()
        self._outgoing.synchronize()
