"""The iterators around that of an epoch: they tell of skipped samples, copy ahead, transform."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..._torch.data_loader import pin_memory, warn_script
from ..resume.progress import Progress
from ..resume.skipping import BatchWithSkipped
from ..stats import Metered
from ..transforms import Compose
from ..types import Loader, State, Transform
from .copies import Copier, Copy

NAMED = 100  # samples that stats() names


class BatchStage(Metered):
    """An iterator over another one's batches.

    Args:
        batches: the other one, over an epoch: of torch, ours, or another stage.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._begin()

    def _begin(self) -> None:
        """Notes that an epoch begins."""

    def __iter__(self) -> Iterator[object]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        """Starts the next epoch; a DataLoader with persistent workers calls it."""
        self._batches._reset(loader, first_iter)
        self._begin()

    def __getstate__(self) -> object:
        raise NotImplementedError(f"{type(self).__name__} cannot be pickled")


class LeavingOut(BatchStage):
    """Delivers what is left of batches that lost samples, and warns of an epoch's first sample.

    Args:
        batches: as of BatchStage.
        counts: gets what DataLoader.stats() has of skipped samples.
    """

    stage = "skip"

    def __init__(self, batches: Any, counts: State) -> None:
        self._counts = counts
        super().__init__(batches)

    def _begin(self) -> None:
        self._counts.update(samples=0, batches=0, named=[])

    def _next(self) -> object:
        while isinstance(batch := next(self._batches), BatchWithSkipped):
            self._note(batch)
            if not batch.is_empty:
                return batch.batch
        return batch

    def _note(self, batch: BatchWithSkipped) -> None:
        counts, first = self._counts, batch.skipped[0]
        counts["samples"] += len(batch.skipped)
        counts["batches"] += batch.is_empty
        counts["named"] += map(dict, batch.skipped[: NAMED - len(counts["named"])])
        if counts["samples"] == len(batch.skipped):
            of_worker = "" if first["worker"] is None else f" of worker {first['worker']}"
            warn_script(
                f"skip_errors: sample {first['index']}{of_worker} is left out: {first['error']}. "
                "stats() of the DataLoader has the others of this epoch"
            )


class _Ahead(NamedTuple):
    """A batch whose copy was started, or the error in its place."""

    copy: Copy | None
    error: Exception | None  # what stands in its place
    mark: Progress  # the place after it


class DeviceIterator(BatchStage):
    """Delivers another iterator's batches, on a device.

    Errors come where they would without it; the other iterator is asked no further until then.

    Args:
        batches: as of BatchStage.
        copier: to the device.
        ahead: how many batches stay on the device besides the one that is delivered.
    """

    stage = "device"

    def __init__(self, batches: Any, copier: Copier, ahead: int) -> None:
        self._copier = copier
        self._ahead = ahead
        self._lock = threading.Lock()
        self._process = os.getpid()
        super().__init__(batches)

    def _begin(self) -> None:
        self._queue: deque[_Ahead] = deque()
        self._ended = False
        self._progress: Progress = self._batches.progress.mark()

    @property
    def progress(self) -> Progress:
        return self._progress

    @property
    def _pin_memory(self) -> bool:
        """True if batches are delivered page-locked: what makes others of them does likewise."""
        return self._copier.streams.device.type == "cpu" and self._batches._pin_memory

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        with self._lock:
            super()._reset(loader, first_iter)

    def _next(self) -> object:
        if self._process != os.getpid():  # another thread may have held it at the fork
            self._process, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            self._copier.streams.current()  # raises where nothing can be copied
            while not self._ended and len(self._queue) <= self._ahead:
                if self._queue and self._queue[-1].error is not None:
                    break
                self._fetch()
            if not self._queue:
                self._progress.go_to(self._batches.progress.mark())
                self._progress.finished = True
                self._copier.forget_passed()
                raise StopIteration
            entry = self._queue.popleft()
            self._progress.go_to(entry.mark)
            if entry.copy is not None:
                return self._copier.finish(entry.copy)
            error = entry.error
            assert error is not None
            try:
                raise error
            finally:
                del entry, error  # else the error would hold itself, and with it the iterator

    def _fetch(self) -> None:
        try:
            copy = self._copier.start(next(self._batches))
        except StopIteration:
            self._ended = True
        except Exception as error:
            self._queue.append(_Ahead(None, error, self._batches.progress.mark()))
        else:
            self._queue.append(_Ahead(copy, None, self._batches.progress.mark()))


def seed_of(base_seed: int, epoch: int, number: int) -> int:
    """The seed of a batch's random numbers.

    The inputs are small numbers close together, and torch's generator uses 32 bits of a seed.
    """
    digest = hashlib.blake2b(f"{base_seed} {epoch} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Transformed(BatchStage):
    """Delivers another iterator's batches, transformed in the thread that asks for them.

    The random numbers of a Compose depend on the epoch's base seed, which torch draws at its start,
    and on the batch's number: nothing else has to be kept to go on in the middle of an epoch.

    Args:
        batches: as of BatchStage.
        transforms: a Compose or any other function of a batch.
        own: of the loader; its epoch counts those of one iterator, for with persistent workers
            torch draws one base seed for all.
    """

    stage = "transforms"

    def __init__(self, batches: Any, transforms: Transform, own: Any) -> None:
        super().__init__(batches)
        self._transforms = transforms
        self._own = own
        self._epoch = own.epoch
        self._generator = torch.Generator()

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._epoch += 1
        self._own.epoch = self._epoch

    def _next(self) -> object:
        batch = next(self._batches)
        if isinstance(self._transforms, Compose):
            batch = self._transforms(batch, generator=self._seeded())
        else:
            batch = self._transforms(batch)
        if self._pin_memory:
            batch = pin_memory(batch, self._pin_memory_device)
        return batch

    def _seeded(self) -> torch.Generator:
        seed = seed_of(int(self._base_seed), self._epoch, self.progress.count - 1)
        return self._generator.manual_seed(seed)
