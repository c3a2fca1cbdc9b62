"""The types by which the parts of a loader know each other, datasets and samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import Any, Protocol, TypedDict

import torch

# What state_dict() gives: of a loader, a sampler, a dataset or a worker. Keys are torchdata's.
State = dict[str, Any]
CollateFn = Callable[[Any], Any]  # samples, in a list as a rule, to a batch
WorkerInitFn = Callable[[int], None]
# Of libraries that come with extras, or may not be installed, and are not typed.
Handle = Any  # of an open file: of h5py, pyarrow, lmdb, or what these give of one
Array = Any  # of NumPy, or anything with a length that is indexed like one
Transform = Callable[[Any], Any]  # of a sample, or of a batch
Parse = Callable[[bytes], Any]  # makes a sample, or a part of one, of what a file has of it


class TorchOptions(TypedDict, total=False):
    """The arguments of torch.utils.data.DataLoader after the dataset, by name."""

    batch_size: int | None
    shuffle: bool | None
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[list[Any]] | None
    num_workers: int
    collate_fn: CollateFn | None
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: WorkerInitFn | None
    multiprocessing_context: BaseContext | str | None
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool


class Loader(Protocol):
    """A DataLoader as its iterators see it: torch's attributes, and ours under one name."""

    _faststep: Any  # Extras of options.py, which knows the iterators' parts

    @property
    def _index_sampler(self) -> Iterable[Any]: ...

    dataset: Any
    batch_sampler: Any
    batch_size: int | None
    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool

    @property
    def collate_fn(self) -> CollateFn: ...
    @property
    def worker_init_fn(self) -> WorkerInitFn | None: ...
    @property
    def path(self) -> str: ...
    def check_worker_number_rationality(self) -> None: ...
