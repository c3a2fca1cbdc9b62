"""torch's iterator over worker processes, with batches that come through an arena."""

from __future__ import annotations

import os
import traceback
from typing import Any

from ..._torch.data_loader import MultiProcessingDataLoaderIter
from ..deliver.copies import copier_of
from ..plain import PlacedWorkers
from ..resume.loader_stand_in import LoaderStandIn
from ..types import CollateFn, Loader, State, WorkerInitFn
from .arena import Arena, Workers
from .packer import Packer, Start

__all__ = ["ProcessIterator"]


class ProcessIterator(PlacedWorkers, MultiProcessingDataLoaderIter):
    """torch's iterator, whose workers get another collate function and start another way.

    Args:
        loader: the DataLoader.
        workers: of the loader; has an arena to lend.
        state: of an epoch to go on with, or of the end of one; None for a new one.
    """

    def __init__(self, loader: Loader, workers: Workers, state: State | None = None) -> None:
        self._lender = workers
        self._process = os.getpid()
        self._arena: Arena | None = workers.lend()
        device = loader._faststep.device
        self._locks = False  # then batches need not be copied to be page-locked
        if device is not None and device.type == "cuda":
            self._locks = self._arena.prepare_locks(copier_of(device).streams.device.index)
        super().__init__(LoaderStandIn(loader, state, has_processes=True))

    @property
    def _pin_memory(self) -> bool:
        return self._pins and not self._locks

    @_pin_memory.setter
    def _pin_memory(self, pins: bool) -> None:
        self._pins = pins

    @property
    def _collate_fn(self) -> Packer:
        return self._packer

    @_collate_fn.setter
    def _collate_fn(self, collate_fn: CollateFn) -> None:
        assert self._arena is not None
        self._packer = Packer(collate_fn, self._arena)

    @property
    def _worker_init_fn(self) -> Start:
        return self._start

    @_worker_init_fn.setter
    def _worker_init_fn(self, init_fn: WorkerInitFn | None) -> None:
        self._start = Start(init_fn, self._packer)

    def _next_data(self) -> Any:
        if self._process != os.getpid():
            raise RuntimeError(
                "the workers of this iterator belong to the process that was forked; "
                "iterate over the DataLoader anew in the child"
            )
        try:
            return super()._next_data()
        except Exception as error:
            # A frame that raises a variable is in a cycle with it and with this iterator: when that
            # is collected its queues go first, and its workers are not told to end.
            traceback.clear_frames(error.__traceback__)
            raise

    def _shutdown_workers(self) -> None:
        """Ends the workers; a forked child leaves them to its parent."""
        if self._process != os.getpid():
            return
        super()._shutdown_workers()
        if self._shutdown and not any(worker.is_alive() for worker in self._workers):
            arena, self._arena = self._arena, None
            if arena is not None:
                self._lender.give_back(arena)
