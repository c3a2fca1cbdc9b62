"""The collate function that worker processes get: it collates into the arena."""

from __future__ import annotations

import gc
import operator
from typing import Any

import torch

from ... import _C
from ..._torch.data_loader import (
    collate_tensors,
    collated_stacking_by,
    collates_as_default,
    let_errors_travel,
    let_fetch,
)
from ..deliver.batch_buffers import BatchBuffers, Samples, tensor_over, why_not_plain
from ..types import CollateFn, WorkerInitFn
from .arena import Arena
from .packed_batch import pack
from .rows import CONTAINERS, Rows

__all__ = ["Packer", "Start"]


class Start:
    """Run first in a worker process, before the user's `worker_init_fn`."""

    def __init__(self, init_fn: WorkerInitFn | None, packer: Packer) -> None:
        self._init_fn = init_fn
        self._packer = packer

    def __call__(self, worker: int) -> None:
        gc.freeze()  # walking over what was inherited would copy its memory, or end its iterators
        _C.keep_freed_memory()
        let_fetch(Packer)
        let_errors_travel()
        self._packer.begin()
        if self._init_fn is not None:
            self._init_fn(worker)


class Packer:
    """Collates as `collate_fn` does, and returns the batch as a packed batch for the main process.

    A batch that has nothing but numbers and texts stays as it is.

    Tensors that torch's default_collate stacks are stacked in the arena, also if the script's
    collate_fn calls it. Other tensors are copied there. A dataset that makes several samples at
    once may write them into the arena, if `collate_fn` is default_collate. Such samples share
    memory with the batch, so no other code may see them.
    """

    def __init__(self, collate_fn: CollateFn, arena: Arena) -> None:
        self._collate_fn = collate_fn
        self._arena = arena
        self._lent: dict[int, int] = {}  # blocks for the batch that is made, by address
        self._buffers = BatchBuffers(self._lend)

    def begin(self) -> None:
        """Makes this process a worker."""
        if collates_as_default(self._collate_fn, ()):
            self._buffers.begin()

    def _lend(self, size: int) -> torch.Tensor:
        block, memory = self._arena.memory.take(size)
        self._lent[memory.data_ptr()] = block
        return memory

    def __call__(self, samples: object) -> object:
        stack = _Stack(self._arena.memory, self._buffers)
        batch = self._collated(stack, samples)
        self._buffers.forget()
        stack.blocks.update(self._lent)
        self._lent = {}
        return self._parcel(stack, batch, [samples] if isinstance(samples, Samples) else [])

    def fetch(self, dataset: object, indices: object) -> object:
        """The packed batch of the samples of a map-style dataset; see `let_fetch`."""
        if (
            type(indices) is not list
            or getattr(dataset, "__getitems__", None)
            or not collates_as_default(self._collate_fn, CONTAINERS)
        ):
            return NotImplemented
        stack = _Stack(self._arena.memory, self._buffers)
        samples = Rows(stack.begin, len(indices)).fetch(dataset, indices)
        batch = self._collated(stack, samples)
        del samples  # while there are rows of it a block cannot be sent
        return self._parcel(stack, batch, [])

    def _collated(self, stack: _Stack, samples: object) -> list[object]:
        return [collated_stacking_by(stack, self._collate_fn, samples)]

    def _parcel(self, stack: _Stack, batch: list[object], leaving: list[list[object]]) -> object:
        if _C.is_built_in(batch[0]):  # then torch's queue is as quick
            return batch.pop()
        return pack(self._arena.key, self._arena.memory, batch, stack.blocks, leaving)


class _Stack:
    """torch's function for a list of tensors, with the result in a block."""

    def __init__(self, memory: _C.Arena, buffers: BatchBuffers | None = None) -> None:
        self._memory = memory
        self._buffers = buffers
        self._begun: dict[int, tuple[int, torch.Tensor, list[torch.Tensor]]] = {}  # by first row
        self.blocks: dict[int, int] = {}  # by address

    def begin(self, like: torch.Tensor, count: int) -> list[torch.Tensor] | None:
        """Tensors that will be stacked where they are, if they come in this order; None if not."""
        taken = self._take(like, count)
        if taken is None:
            return None
        rows = list(taken[1].unbind(0))
        self._begun[id(rows[0])] = *taken, rows
        return rows

    def _take(self, like: torch.Tensor, count: int) -> tuple[int, torch.Tensor] | None:
        """A block, and a tensor over it that holds so many others."""
        try:
            block, memory = self._memory.take(count * like.nbytes)
        except MemoryError:  # the packed batch says so
            return None
        return block, tensor_over(memory, like.dtype, 0, (count, *like.shape))

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        first = batch[0]
        if why_not_plain(first) is not None or set(map(type, batch)) != {torch.Tensor}:
            return collate_tensors(batch)
        whole = None if self._buffers is None else self._buffers.whole(batch)
        if whole is not None:
            return whole
        block, out, rows = self._begun.pop(id(first), (0, None, []))
        if out is None or len(batch) != len(rows) or not all(map(operator.is_, batch, rows)):
            taken = self._take(first, len(batch))
            if taken is None:
                return collate_tensors(batch)
            block, out = taken
            try:
                torch.stack(batch, 0, out=out)
            except RuntimeError:  # torch has its own words for it
                return collate_tensors(batch)
        self.blocks[out.data_ptr()] = block
        return out
