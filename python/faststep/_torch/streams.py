"""Which CUDA streams are torch's own."""

from __future__ import annotations

import torch


def lasts(device: int, handle: int) -> bool:
    """True if the stream that is current on a CUDA device is never destroyed.

    That holds for the streams of torch's pools. A user has made any other, and given it to torch as
    an ExternalStream, so another one for the same handle equals it.

    Args:
        device: the device's ordinal.
        handle: the stream, a CUstream, as C has found it.
    """
    current = torch.cuda.current_stream(device)
    external = [
        torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]
        for _ in range(2)
    ]
    return bool(
        current.cuda_stream == handle and external[0] == external[1] and external[0] != current
    )
