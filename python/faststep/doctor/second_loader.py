"""The batches of a script's loop, and those of another loader in their place."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from .._torch.data_loader import BaseDataLoaderIter
from ..run.swaps import LOADERS
from .alternation import Switch
from .inspected import LoaderUse
from .remedies import for_loaders

# Whose iterators share nothing but random generators.
SAMPLERS = (
    *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler),
    DistributedSampler,
)
COPIED = (
    *("dataset", "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
)
AHEAD = 2  # batches that each worker loads ahead, where nothing else is said


class ScriptLoaders:
    """What gives a script its batches.

    Attributes:
        uses: of all DataLoaders, by their `id`.
        keeps: the newest batch of each loader is kept from now on; may be set.
    """

    def __init__(self) -> None:
        self.uses: dict[int, LoaderUse] = {}
        self.keeps = False
        self._newest: dict[LoaderUse, Any] = {}
        self._instead: Callable[[LoaderUse], Any] | None = None
        self._thread = threading.get_ident()

    def watch(self) -> None:
        """See all DataLoaders that give batches from now on."""
        make, following = DataLoader.__iter__, BaseDataLoaderIter.__next__

        def made(loader: Any) -> Any:
            use = self.uses.setdefault(id(loader), LoaderUse(loader))
            begun = time.perf_counter()
            iterator = make(loader)
            use.begin(iterator, time.perf_counter() - begun)
            return iterator

        def timed(iterator: Any) -> Any:
            begun, is_last = time.perf_counter(), True
            use = getattr(iterator, "_faststep_use", None)
            if use is not None and self._instead is not None and self._is_here():
                batch = self._instead(use)
                if batch is not None:
                    return batch
            try:
                batch = following(iterator)
                is_last = False
                if self.keeps and use is not None:
                    self._newest[use] = batch
                return batch
            finally:
                LoaderUse.waited(iterator, time.perf_counter() - begun, is_last)

        DataLoader.__iter__ = made  # type: ignore[method-assign]
        BaseDataLoaderIter.__next__ = timed  # type: ignore[method-assign,assignment]

    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def repeat(self, is_on: bool) -> None:
        """Give the newest batch of each loader again and again."""
        self._instead = self._newest.get if is_on else None

    def switches(self, cores: int) -> list[Switch]:
        """Other loaders in the place of the one that is waited for longest, if they can be."""
        main = max(self.uses.values(), key=lambda use: use.wait, default=None)
        if main is None or not _can_be_read_beside(main.loader):
            return []
        made = []
        loader = main.loader
        workers = loader.num_workers
        for name, change in for_loaders(workers, main.is_pageable, cores).items():
            options = change.get("loader", {})
            kind: Any = DataLoader if "loader" in change else LOADERS[DataLoader]
            batches = _endless(loader, kind, options)
            ahead = max(loader.prefetch_factor or 0, options.get("prefetch_factor", AHEAD))
            most = max(workers, options.get("num_workers", 0))
            made.append(Switch(name, self._turn(main, batches), change, skipped=1 + ahead * most))
        return made

    def _turn(self, main: LoaderUse, batches: Iterator[Any]) -> Callable[[bool], object]:
        def following(use: LoaderUse) -> Any:
            return next(batches, None) if use is main else None

        def turn(is_on: bool) -> None:
            self._instead = following if is_on else None

        return turn


def _endless(one: DataLoader[Any], kind: Any, options: dict[str, Any]) -> Iterator[Any]:
    """Batches of another loader of the same samples, in an order of the same sampler.

    Args:
        one: the script's loader.
        kind: the class of the other one.
        options: arguments that it has instead.
    """
    given = {name: getattr(one, name) for name in COPIED} | options
    if one.batch_sampler is None:
        given |= {"batch_size": None, "sampler": one.sampler}
    else:
        given["batch_sampler"] = one.batch_sampler
    with _generators_kept(one):
        other = kind(**given)
    while len(other):
        with _generators_kept(one):
            batches = iter(other)
        yield from batches


def _can_be_read_beside(loader: Any) -> bool:
    """True if a second iterator takes nothing from the first one."""
    context = loader.multiprocessing_context or multiprocessing
    batches = loader.batch_sampler
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.sampler) in SAMPLERS
        and (batches is None or type(batches) is BatchSampler)
        and context.get_start_method() == "fork"  # others import the script again
    )


@contextlib.contextmanager
def _generators_kept(loader: Any) -> Iterator[None]:
    """Put the random generators back that the beginning of an epoch draws from."""
    own = (loader.generator, getattr(loader.sampler, "generator", None))
    kept = [(one, one.get_state()) for one in own if one is not None]
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for one, before in kept:
            one.set_state(before)
