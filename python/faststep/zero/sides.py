"""What differs between parameters in CPU memory and on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..optim.request import StepAnswer, StepRequest
from .buckets import GradientBucket
from .cuda_buckets import CudaBucket
from .cuda_steps import CudaSteps
from .group import Group
from .host_steps import HostSteps
from .owned import Owned
from .slots import Slot
from .uses import CudaUses, Uses

__all__ = ["Side", "side_of"]


class Steps(Protocol):
    """What a step does between backward and the gathering of parameters."""

    def __init__(self, slots: Sequence[Slot], owned: Owned, group: Group) -> None: ...

    def update(self, request: StepRequest) -> tuple[StepAnswer, bool]:
        """Update this rank's slices; returns whether they may have changed too. A collective."""

    def clip(self, max_norm: float, error_if_nonfinite: bool) -> tuple[Tensor, list[bool]]:
        """Clip by the common norm; returns it and which gradients are present. A collective."""

    def unscale(self, dtype: torch.dtype, inv_scale: Tensor, found_inf: Tensor) -> None:
        """Multiply the gradients of a dtype, and look for infinities on all ranks; a collective."""


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
