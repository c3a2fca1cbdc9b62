"""What differs between parameters in CPU memory and on a CUDA device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .buckets import GradientBucket
from .cuda_buckets import CudaBucket
from .cuda_steps import CudaSteps
from .host_steps import HostSteps
from .steps import Steps
from .uses import CudaUses, Uses

__all__ = ["Side", "side_of"]


class Side(NamedTuple):
    """The classes for one kind of memory.

    Attributes:
        evenly: all ranks' slices of a bucket have one size, as its collectives need it.
    """

    evenly: bool
    bucket: type[GradientBucket]
    uses: type[Uses]
    steps: type[Steps]


_HOST = Side(False, GradientBucket, Uses, HostSteps)
_CUDA = Side(True, CudaBucket, CudaUses, CudaSteps)


def side_of(device: torch.device) -> Side:
    """The classes for parameters on a device."""
    return _CUDA if device.type == "cuda" else _HOST
