"""Makes states of zeros; small ones side by side."""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack

from .._torch.dtensor import is_dtensor, like_dtensor, local_of

# pickle and copy.deepcopy() of one tensor take its whole slab along, so slabs are small.
SLAB = 4096  # bytes
SHARED_BY = 16  # tensors of a size at most
SMALL = SLAB // 2  # bytes; larger ones have memory of their own
ALIGNMENT = 64  # bytes: torch's own


class Zeros:
    """Makes the states of an optimizer.

    A step over thousands of small tensors spends its time on cache misses. States of at most 2 KiB
    in CPU memory lie one after another in slabs of up to 4 KiB. A slab has one storage and one
    version counter, so a step reads fewer cache lines. The first slab has the size of one state,
    so an optimizer of one parameter takes no more than it needs. Each new slab is twice as large,
    up to 4 KiB or 16 states. To resize its storage raises RuntimeError.
    """

    def __init__(self) -> None:
        self._slabs: dict[tuple[torch.dtype, int, bool], tuple[Tensor, int]] = {}
        self._taking = threading.Lock()  # no two threads take the same place

    def like(self, param: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros of a parameter's shape, strides, device and dtype or another, divided as it is."""
        dtype = dtype or param.dtype
        if is_dtensor(param):  # torch cannot copy one whose part begins elsewhere in a storage
            local = _plain(local_of(param), dtype)
            return like_dtensor(param, local)
        if (
            type(param) not in (Tensor, Parameter)
            or param.device.type != "cpu"
            or param.layout != torch.strided
            or not 0 < param.numel() * dtype.itemsize <= SMALL
        ):
            return _plain(param, dtype)
        strides = param.stride()
        if not param.is_contiguous():
            strides = torch.empty_like(param, device="meta").stride()
        return self._take(dtype, ALIGNMENT // dtype.itemsize, param.size(), strides)

    def scalar(self, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """A 0-d zero."""
        if torch.device(device).type != "cpu":
            return torch.zeros((), dtype=dtype, device=device)
        return self._take(dtype, 1, torch.Size(), ())

    def _take(
        self, dtype: torch.dtype, align: int, size: torch.Size, strides: tuple[int, ...]
    ) -> Tensor:
        count = -(-size.numel() // align) * align
        with self._taking:
            slab, begin = self._place(dtype, align, count)
        # detached: autograd treats a view that was made without it unlike other tensors
        return slab.as_strided(size, strides, begin).detach()

    def _place(self, dtype: torch.dtype, align: int, count: int) -> tuple[Tensor, int]:
        """The slab, and where in it `count` elements are free, which they are no longer."""
        key = (dtype, align, torch.is_inference_mode_enabled())
        slab, used = self._slabs.get(key, (None, 0))
        if slab is None or used + count > slab.numel():
            grown = 0 if slab is None else 2 * slab.numel()
            most = min(SHARED_BY * count, SLAB // dtype.itemsize)
            slab, used = torch.zeros(max(count, min(grown, most)), dtype=dtype, device="cpu"), 0
            if type(slab) is not Tensor:  # made by a mode, such as FakeTensorMode, that will end
                return slab, 0
            # Over memory of DLPack, which torch does not resize: that would free all its states.
            slab = from_dlpack(slab)
        self._slabs[key] = slab, used + count
        return slab, used


def _plain(param: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
