"""Samples that cannot be read, which are left out of their batch where the loader is to skip them.

The dataset's stand-in gives a Skipped in their place. The collate function's stand-in takes these
out, and sends them with what is left of the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import get_worker_info

from ..._torch.data_loader import pin_memory
from ..types import CollateFn

MOST_IN_A_ROW = 1000  # samples of an iterator that raises and raises
SHOWN = 500  # characters


class Skipped(dict[str, Any]):
    """The entry of DataLoader.stats() about a sample that was left out."""


def _attempt(read: Callable[[Any], object], index: Any) -> object:
    """A sample, or a Skipped in its place."""
    try:
        return read(index)
    except (MemoryError, StopIteration):
        raise
    except Exception as error:
        text, worker = f"{type(error).__name__}: {error}"[:SHOWN], get_worker_info()
        index = index if type(index) is int else repr(index)[:SHOWN]
        return Skipped(index=index, worker=worker and worker.id, error=text)


class SkippingDataset:
    """Stands in for a map-style dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: object) -> object:
        return _attempt(lambda index: self.dataset[index], index)

    @property
    def __getitems__(self) -> Callable[[list[object]], object] | None:
        return self._many if getattr(self.dataset, "__getitems__", None) else None

    def _many(self, indices: list[object]) -> object:
        many = self.dataset.__getitems__
        whole = _attempt(many, indices)
        if type(whole) is not Skipped:
            return whole
        each = [_attempt(lambda index: many([index]), index) for index in indices]
        if not all(isinstance(one, (list, Skipped)) for one in each):
            name = type(self.dataset).__name__
            raise TypeError(f"skip_errors: {name}.__getitems__ gives no list: {whole['error']}")
        return [s for one in each for s in (one if isinstance(one, list) else [one])]


def skipping(samples: Iterator[object]) -> Iterator[object]:
    """The samples of an iterable dataset, with a Skipped for each time that it raises.

    Raises:
        RuntimeError: it raises without end.
    """
    in_a_row = 0
    for number in itertools.count():
        try:
            sample = _attempt(lambda _: next(samples), number)
        except StopIteration:
            return
        in_a_row = in_a_row + 1 if type(sample) is Skipped else 0
        if in_a_row > MOST_IN_A_ROW:
            raise RuntimeError(
                f"skip_errors: {in_a_row} samples in a row raised, the last {sample}"
            )
        yield sample


@dataclass(eq=False)
class BatchWithSkipped:
    """The rest of a batch that lost samples, on its way to the script."""

    batch: object
    is_empty: bool
    skipped: list[Skipped]

    def pin_memory(self, device: str | None = None) -> BatchWithSkipped:
        """Torch's thread that pins batches calls it."""
        return BatchWithSkipped(pin_memory(self.batch, device), self.is_empty, self.skipped)


class SkippingCollate:
    """Stands in for the loader's collate function."""

    def __init__(self, collate_fn: CollateFn) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: Any) -> object:
        if type(samples) is Skipped:  # batch_size=None
            return BatchWithSkipped(None, True, [samples])
        skipped = [s for s in samples if type(s) is Skipped] if isinstance(samples, list) else []
        if not skipped:
            return self.collate_fn(samples)
        kept = [sample for sample in samples if type(sample) is not Skipped]
        return BatchWithSkipped(self.collate_fn(kept) if kept else None, not kept, skipped)
