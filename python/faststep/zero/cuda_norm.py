"""The global norm on a CUDA device: chunks' sums are exchanged and folded there, as on the host.

Nothing waits for the device. So ranks cannot ask each other which gradients are there before they
step. They exchange a number made of that, and the step is skipped on all ranks where it differs;
the next step raises.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._devices import on_device, ordinal_of
from .group import Group
from .norm import ChunkSums
from .slots import Slot

__all__ = ["DeviceChunkSums", "DeviceMeasured"]

MOST_CODES = 2**13  # squares of sums of so many are exact in float64 for up to 8192 ranks


class DeviceMeasured(NamedTuple):
    """What all ranks know after the exchange, in tensors without dimensions."""

    norm: Tensor  # float64, of the gradients divided by the scale
    found_inf: Tensor  # float32, 1 where an element is infinite or NaN
    differ: Tensor  # float32, 1 where not all ranks have gradients of the same parameters


class DeviceChunkSums(ChunkSums):
    """Measures the gradients of the slots, which are given in the order of parameter groups."""

    def __init__(self, slots: Sequence[Slot], group: Group) -> None:
        super().__init__(slots, group)
        self._places: dict[tuple[bool, ...], tuple[Tensor, Tensor]] = {}

    def measure_there(self, grad_scale: Tensor | None) -> DeviceMeasured:
        """Read this rank's gradients once, and exchange the sums; a collective."""
        device = self._slots[0].param.device
        present = tuple(slot.is_present for slot in self._slots)
        index, code = self._placed(present, device)
        grads = [
            grad
            for slot, here in zip(self._slots, present, strict=True)
            if here
            for _, grad in slot.pieces
        ]
        sums = torch.zeros(index.numel(), dtype=torch.float64, device=device)
        found = torch.zeros((), dtype=torch.float32, device=device)
        scale = None if grad_scale is None else on_device(grad_scale, ordinal_of(found))
        if grads:
            _C.device_chunk_squares(grads, scale, sums, found)
        # Each chunk is measured by one rank, so adding up changes no sum.
        everything = torch.zeros(self._total + 3, dtype=torch.float64, device=device)
        everything.index_copy_(0, index, sums)
        said = everything[self._total :]
        said[0].copy_(found)
        said[1:].copy_(code)
        self._group.add_up_inside(everything, "adding up the norm")
        if self._group.replicas is not None:  # these have the same sums
            self._group.replicas.add_up(said, "agreeing on an overflow over the replicas")
        norm = torch.zeros((), dtype=torch.float64, device=device)
        if self._total:
            _C.device_fold_squares(everything[: self._total], norm)
        differ = said[2] * self._group.total != said[1] * said[1]
        return DeviceMeasured(norm, (said[0] != 0.0).float(), differ.float())

    def _placed(self, present: tuple[bool, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the chunks of these gradients are among all, and the number made of which they are.

        Uploaded once: that waits for the device.
        """
        if present not in self._places:
            chunks = [
                chunk
                for number, here in enumerate(present)
                if here
                for chunk in self._index[number]
            ]
            index = torch.tensor(chunks, dtype=torch.int64, device=device)
            code = float(zlib.crc32(bytes(present)) % MOST_CODES)
            both = torch.tensor([code, code * code], dtype=torch.float64, device=device)
            self._places[present] = index, both
        return self._places[present]
