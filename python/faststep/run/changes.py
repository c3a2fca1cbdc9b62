"""Changes of what a script does that its text does not show: threads, workers, denormal numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch.utils.data import DataLoader

__all__ = ["Changes", "make_changes", "summary"]


class Changes(TypedDict, total=False):
    """What is changed, as JSON has it.

    Attributes:
        parts: those of `run` that are swapped.
        threads: of torch, whatever the script sets.
        flush: denormal numbers become zero.
        autocast: "off": contexts of autocast do nothing.
        loader: arguments that every DataLoader of torch gets.
        keep_samples: datasets remember what they have given.
    """

    parts: list[str]
    threads: int
    flush: bool
    autocast: str
    loader: dict[str, Any]
    keep_samples: bool


def make_changes(changes: Changes) -> None:
    """Change what a script that this process runs from now on does, but for its `parts`."""
    if threads := changes.get("threads"):
        torch.set_num_threads(threads)
        torch.set_num_threads = lambda count: None  # type: ignore[assignment]
    if changes.get("flush"):
        torch.set_flush_denormal(True)
    if changes.get("autocast") == "off":
        _wrap(torch.autocast, lambda args, kwargs: (args, {**kwargs, "enabled": False}))
    loader, keeps = changes.get("loader", {}), changes.get("keep_samples", False)
    if loader or keeps:

        def changed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            dataset, *others = args or (kwargs.pop("dataset"),)
            if keeps and hasattr(dataset, "__len__"):
                dataset = _Kept(dataset)
            return (dataset, *others), {**kwargs, **loader}

        _wrap(DataLoader, changed)


def summary(changes: Changes) -> str:
    """What `make_changes` does, for a line of a report."""
    loader = changes.get("loader", {})
    said = [f"{name}={value}" for name, value in loader.items()]
    if threads := changes.get("threads"):
        said.append(f"{threads} threads")
    if changes.get("flush"):
        said.append("denormal numbers are zero")
    if changes.get("autocast") == "off":
        said.append("no autocast")
    if changes.get("keep_samples"):
        said.append("samples are kept in memory")
    return "; ".join(said)


def _wrap(kind: Any, changed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Let the constructor of a class have other arguments."""
    make = kind.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = changed(args, kwargs)
        make(self, *args, **kwargs)

    kind.__init__ = made


class _Kept:
    """A dataset that reads each sample once."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._samples: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)

    def __getitem__(self, index: Any) -> Any:
        if index not in self._samples:
            self._samples[index] = self._dataset[index]
        return self._samples[index]
