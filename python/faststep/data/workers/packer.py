"""The collate function that worker processes get: it collates into the arena."""

from __future__ import annotations

import gc
from typing import Any

import torch

from faststep import _C
from faststep._torch import collate_tensors, stacking_tensors_by

from .arena import Arena
from .parcel import Parcel, pack, tensor_over, why_not_plain

__all__ = ["Packer", "Start"]


class Start:
    """What a worker process runs first, before the user's `worker_init_fn`."""

    def __init__(self, init_fn: Any) -> None:
        self._init_fn = init_fn

    def __call__(self, worker: int) -> None:
        gc.freeze()  # walking over what was inherited would copy its memory, or end its iterators
        _C.keep_freed_memory()
        if self._init_fn is not None:
            self._init_fn(worker)


class Packer:
    """Collates as `collate_fn` does, and returns the batch as a parcel for the main process.

    Tensors that torch's default_collate stacks, called by whomever, are stacked in the arena;
    others are copied there.
    """

    def __init__(self, collate_fn: Any, arena: Arena) -> None:
        self._collate_fn = collate_fn
        self._arena = arena

    def __call__(self, samples: Any) -> Parcel:
        stack = _Stack(self._arena.memory)
        with stacking_tensors_by(stack):
            batch = [self._collate_fn(samples)]
        return pack(self._arena.key, self._arena.memory, batch, stack.blocks)


class _Stack:
    """torch's function for a list of tensors, with the result in a block."""

    def __init__(self, memory: _C.Arena) -> None:
        self._memory = memory
        self.blocks: dict[int, int] = {}  # by address

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        first = batch[0]
        if why_not_plain(first) is not None:
            return collate_tensors(batch)
        shape = (len(batch), *first.shape)
        try:
            block, memory = self._memory.take(len(batch) * first.numel() * first.element_size())
        except MemoryError:  # the parcel says so
            return collate_tensors(batch)
        try:
            out = tensor_over(memory, first.dtype, 0, shape)
            stacked = torch.stack(batch, 0, out=out)
        except RuntimeError:  # torch has its own words for it
            return collate_tensors(batch)
        self.blocks[memory.data_ptr()] = block
        return stacked
