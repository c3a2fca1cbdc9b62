"""torch's iterator over worker processes, with batches that come through an arena."""

from __future__ import annotations

from ..deliver.copies import copier_of
from ..plain import OwnWorkers
from ..resume.loader_stand_in import LoaderStandIn
from ..types import Loader, State
from .arena import Arena, Workers
from .packer import Packer, Start


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
        self._arena: Arena | None = workers.lend()
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
