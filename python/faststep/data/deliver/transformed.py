"""The iterator that transforms each batch at delivery."""

from __future__ import annotations

from typing import Any

import torch

from ..._torch.data_loader import pin_memory
from ..resume.progress import EpochIterator, Progress
from ..stats import BatchStage
from ..transforms import Compose
from ..types import CountsEpochs, Loader, Transform

__all__ = ["Transformed", "seed_of"]


def seed_of(base_seed: int, epoch: int, number: int) -> int:
    """The seed of a batch's random numbers: SplitMix64 (Steele, Lea & Flood 2014) over all three.

    The inputs are small numbers close together, and torch's generator uses 32 bits of a seed.
    """
    mask = (1 << 64) - 1
    state = 0
    for value in (base_seed, epoch, number):
        state = ((state ^ value) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state


class Transformed(BatchStage):
    """Delivers another iterator's batches, transformed in the thread that asks for them.

    The random numbers of a Compose depend on the epoch's base seed, which torch draws at its start,
    and on the batch's number: nothing else has to be kept to go on in the middle of an epoch.

    Args:
        iterator: an ArrayIterator, one of plain.py, or a DeviceIterator over one of them.
        transforms: a Compose or any other function of a batch.
        own: of the loader; its epoch counts those of one iterator, for with persistent workers
            torch draws one base seed for all.
    """

    stage = "transforms"

    def __init__(self, iterator: EpochIterator, transforms: Transform, own: CountsEpochs) -> None:
        self._batches: EpochIterator = iterator
        self._transforms = transforms
        self._own = own
        self._epoch = own.epoch
        of_host: Any = getattr(iterator, "_batches", iterator)
        self._base_seed = int(of_host._base_seed)
        self._generator = torch.Generator()

    @property
    def progress(self) -> Progress:
        progress: Progress = self._batches.progress
        return progress

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        """Starts the next epoch; a DataLoader with persistent workers calls it."""
        self._batches._reset(loader, first_iter)
        self._epoch += 1
        self._own.epoch = self._epoch

    def _next(self) -> object:
        batch = next(self._batches)
        if isinstance(self._transforms, Compose):
            batch = self._transforms(batch, generator=self._seeded())
        else:
            batch = self._transforms(batch)
        if getattr(self._batches, "_pin_memory", False):
            batch = pin_memory(batch, self._batches._pin_memory_device)
        return batch

    def _seeded(self) -> torch.Generator:
        number = self.progress.count - 1
        return self._generator.manual_seed(seed_of(self._base_seed, self._epoch, number))
