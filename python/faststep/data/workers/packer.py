"""The collate function that worker processes get: it collates into the arena."""

from __future__ import annotations

import gc
from typing import Any

import torch

from faststep import _C
from faststep._torch import collate_tensors, collates_as_default, stacking_tensors_by

from ..rows import Lender, Samples
from .arena import Arena
from .parcel import Parcel, pack, tensor_over, why_not_plain

__all__ = ["Packer", "Start"]


class Start:
    """What a worker process runs first, before the user's `worker_init_fn`."""

    def __init__(self, init_fn: Any, packer: Packer) -> None:
        self._init_fn = init_fn
        self._packer = packer

    def __call__(self, worker: int) -> None:
        gc.freeze()  # walking over what was inherited would copy its memory, or end its iterators
        _C.keep_freed_memory()
        self._packer.begin()
        if self._init_fn is not None:
            self._init_fn(worker)


class Packer:
    """Collates as `collate_fn` does, and returns the batch as a parcel for the main process.

    Tensors that torch's default_collate stacks, called by whomever, are stacked in the arena;
    others are copied there. A dataset that makes whole batches gets the arena's memory at once,
    if nobody but default_collate sees its samples: they share that memory with the batch.
    """

    def __init__(self, collate_fn: Any, arena: Arena) -> None:
        self._collate_fn = collate_fn
        self._arena = arena
        self._blocks: dict[int, int] = {}  # of the batch that is made, by address
        self._lender = Lender(self._take)

    def begin(self) -> None:
        """Makes this process a worker."""
        if collates_as_default(self._collate_fn, ()):
            self._lender.begin()

    def __call__(self, samples: Any) -> Parcel:
        with stacking_tensors_by(self._stack):
            batch = [self._collate_fn(samples)]
        self._lender.forget()
        blocks, self._blocks = self._blocks, {}
        leaving = [samples] if isinstance(samples, Samples) else []
        return pack(self._arena.key, self._arena.memory, batch, blocks, leaving)

    def _take(self, size: int) -> torch.Tensor:
        block, memory = self._arena.memory.take(size)
        self._blocks[memory.data_ptr()] = block
        return memory

    def _stack(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        """torch's function for a list of tensors, with the result in a block."""
        first = batch[0]
        if why_not_plain(first) is not None:
            return collate_tensors(batch)
        whole = self._lender.whole(batch)
        if whole is not None:
            return whole
        shape = (len(batch), *first.shape)
        try:
            memory = self._take(len(batch) * first.numel() * first.element_size())
        except MemoryError:  # the parcel says so
            return collate_tensors(batch)
        try:
            return torch.stack(batch, 0, out=tensor_over(memory, first.dtype, 0, shape))
        except RuntimeError:  # torch has its own words for it
            return collate_tensors(batch)
