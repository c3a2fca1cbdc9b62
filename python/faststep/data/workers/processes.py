"""torch's iterator over worker processes, whose collate function writes batches to an arena."""

from __future__ import annotations

import gc
from dataclasses import dataclass
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
from ..deliver.copies import copier_of
from ..plain import OwnWorkers
from ..resume.loader_stand_in import LoaderStandIn
from ..types import CollateFn, Loader, State, WorkerInitFn
from .arena import KeyedArena, Workers
from .packed_batch import pack
from .rows import CONTAINERS, Rows


@dataclass(eq=False)
class Start:
    """Run first in a worker process, before the user's `worker_init_fn`."""

    init_fn: WorkerInitFn | None
    packer: Packer

    def __call__(self, worker: int) -> None:
        gc.freeze()  # walking over what was inherited would copy its memory, or end its iterators
        _C.keep_freed_memory()
        let_fetch(Packer)
        let_errors_travel()
        self.packer.begin()
        if self.init_fn is not None:
            self.init_fn(worker)


class Packer:
    """Collates as `collate_fn` does, and returns the batch as a packed batch for the main process.

    Tensors that torch's default_collate stacks are stacked in the arena, also if the script's
    collate_fn calls it. Other tensors are copied there. A dataset that makes several samples at
    once may write them into the arena, if `collate_fn` is default_collate. Such samples share
    memory with the batch, so no other code may see them.
    """

    def __init__(self, collate_fn: CollateFn, arena: KeyedArena) -> None:
        self._collate_fn = collate_fn
        self._arena = arena
        self._blocks: dict[int, int] = {}  # taken for the batch that is made, by address
        self._buffers = BatchBuffers(self._take)

    def begin(self) -> None:
        """Makes this process a worker."""
        if collates_as_default(self._collate_fn, ()):
            self._buffers.begin()

    def _take(self, size: int) -> torch.Tensor:
        block, memory = self._arena.memory.take(size)
        self._blocks[memory.data_ptr()] = block
        return memory

    def __call__(self, samples: object) -> object:
        return self._packed(samples, [samples] if isinstance(samples, Samples) else [])

    def fetch(self, dataset: object, indices: object) -> object:
        """The packed batch of the samples of a map-style dataset; see `let_fetch`."""
        if (
            type(indices) is not list
            or getattr(dataset, "__getitems__", None)
            or not collates_as_default(self._collate_fn, CONTAINERS)
        ):
            return NotImplemented
        try:
            samples = Rows(self._buffers, len(indices)).fetch(dataset, indices)
        except BaseException:
            self._forget()
            raise
        return self._packed(samples, [samples])

    def _packed(self, samples: object, leaving: list[list[object]]) -> object:
        try:
            batch = [collated_stacking_by(self._stack, self._collate_fn, samples)]
        finally:
            blocks = self._forget()
        return pack(self._arena.key, self._arena.memory, batch, blocks, leaving)

    def _forget(self) -> dict[int, int]:
        """Ends with a batch; returns its blocks."""
        self._buffers.forget()
        blocks, self._blocks = self._blocks, {}
        return blocks

    def _stack(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        """torch's function for a list of tensors, with the result in a block."""
        first = batch[0]
        if why_not_plain(first) is not None or set(map(type, batch)) != {torch.Tensor}:
            return collate_tensors(batch)
        whole = self._buffers.whole(batch)
        if whole is not None:
            return whole
        try:
            memory = self._take(len(batch) * first.nbytes)
        except MemoryError:  # the packed batch says so
            return collate_tensors(batch)
        out = tensor_over(memory, first.dtype, 0, (len(batch), *first.shape))
        try:
            return torch.stack(batch, 0, out=out)
        except RuntimeError:  # torch has its own words for it
            return collate_tensors(batch)


class ProcessIterator(OwnWorkers):
    """torch's iterator, whose workers get another collate function and start another way.

    Args:
        loader: the DataLoader.
        workers: of the loader; has an arena to lend.
        state: of an epoch to go on with, or of the end of one; None for a new one.
    """

    refusal = "the workers of this iterator belong to the process that was forked"

    def __init__(self, loader: Loader, workers: Workers, state: State | None = None) -> None:
        self._lender = workers
        self._arena: KeyedArena | None = workers.lend()
        stand_in = LoaderStandIn(loader, state, has_processes=True)
        packer = Packer(stand_in.collate_fn, self._arena)
        stand_in.collate_fn = packer
        stand_in.worker_init_fn = Start(stand_in.worker_init_fn, packer)
        device = loader._faststep.device
        if device is not None and device.type == "cuda":
            number = copier_of(device).streams.device.index
            if self._arena.prepare_locks(number):  # then they need not be copied to be page-locked
                stand_in.pin_memory = False
        super().__init__(stand_in)

    def _shutdown_workers(self) -> None:
        super()._shutdown_workers()
        if self._shutdown and not any(worker.is_alive() for worker in self._workers):
            arena, self._arena = self._arena, None
            if arena is not None:
                self._lender.give_back(arena)
