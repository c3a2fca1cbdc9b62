"""A second CUDA stream, on which buckets are updated while backward goes on."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from .gradient_buckets import GradientBucket

__all__ = ["Beside"]


class Beside:
    """Waits for each bucket as soon as it is sent: all ranks have their collectives in one order.

    What it reads was taken for the stream of backward, and goes back to that one. So it is held
    until the stream of backward has waited for the second one: nothing waits on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lent: deque[tuple[int, list[Tensor], torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def receiving(self, bucket: GradientBucket) -> Iterator[None]:
        """Inside, the current stream is the second one, which receives and updates a bucket."""
        held = bucket.lend()
        with torch.cuda.stream(self._stream):
            yield
            self._lent.append((bucket.nbytes, held, self._stream.record_event()))

    def make_room(self, most: int) -> None:
        """Let the current stream wait until at most so many bytes are in use."""
        while self._lent and sum(nbytes for nbytes, *_ in self._lent) > most:
            _, _, event = self._lent[0]
            torch.cuda.current_stream().wait_event(event)
            self._lent.popleft()

    def end(self) -> None:
        """Let the current stream wait for everything."""
        torch.cuda.current_stream().wait_stream(self._stream)
        self._lent.clear()
