"""Results of a CUDA device that the host must not wait for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._torch.optim import is_capturing


class Late:
    """Values of a tensor on a CUDA device, copied behind what its stream has been given."""

    def __init__(self, values: Tensor) -> None:
        self._copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._copy.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream())

    def read(self) -> Tensor:
        """The values in CPU memory, as they were; waits for the device until it has come there."""
        self._event.synchronize()
        return self._copy


def refuse_capture() -> None:
    """Raise RuntimeError while a CUDA graph is captured: the host decides what each pass sends."""
    if is_capturing():
        raise RuntimeError(
            "faststep.zero: backward and step of a sharded model cannot be captured into a CUDA "
            "graph; capture forward and loss only, or use the optimizer without shard()"
        )
