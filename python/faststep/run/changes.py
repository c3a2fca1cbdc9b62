"""Changes of what a script does that its text does not show: threads, workers, precision."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from . import forward

__all__ = ["Changes", "make_changes", "summary"]


class Changes(TypedDict, total=False):
    """The changes, as JSON has them.

    Attributes:
        parts: those of `run` that are swapped.
        threads: of torch, whatever the script sets.
        flush: denormal numbers become zero.
        autocast: "off": contexts of autocast do nothing; "bf16": models run in bfloat16.
        channels_last: two-dimensional convolutions have their weights in that layout.
        compile: models are compiled.
        accumulate: steps of a window of gradients that are summed up.
        loader: arguments that every DataLoader of torch gets.
        batch: how often as many samples every batch has.
        ddp: arguments that every DistributedDataParallel gets.
        keep_samples: datasets remember what they have given.
    """

    parts: list[str]
    threads: int
    flush: bool
    autocast: str
    channels_last: bool
    compile: bool
    accumulate: int
    loader: dict[str, Any]
    batch: float
    ddp: dict[str, Any]
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
    elif changes.get("autocast"):
        forward.autocast(torch.bfloat16)
    if changes.get("channels_last"):
        forward.use_channels_last()
    if changes.get("compile"):
        forward.compile_models()
    if steps := changes.get("accumulate"):
        forward.accumulate(steps)
    if ddp := changes.get("ddp"):
        _wrap(DistributedDataParallel, lambda args, kwargs: (args, {**kwargs, **ddp}))
    if changes.keys() & {"loader", "batch", "keep_samples"}:
        _wrap(DataLoader, functools.partial(_of_loader, changes))


def _of_loader(changes: Changes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a DataLoader with the changes."""
    named = inspect.signature(DataLoader).bind_partial(*args, **kwargs).arguments
    dataset = named["dataset"]
    if changes.get("keep_samples") and hasattr(dataset, "__len__"):
        named["dataset"] = _Kept(dataset)
    size = named.get("batch_size", 1)
    if "batch" in changes and size is not None and named.get("batch_sampler") is None:
        named["batch_size"] = max(1, round(size * changes["batch"]))
    return (), {**named, **changes.get("loader", {})}


def summary(changes: Changes) -> str:
    """The work of `make_changes`, for a line of a report."""
    given = {**changes.get("loader", {}), **changes.get("ddp", {})}
    said = [f"{name}={value}" for name, value in given.items()]
    if threads := changes.get("threads"):
        said.append(f"{threads} threads")
    if changes.get("flush"):
        said.append("denormal numbers are zero")
    said += [
        text
        for name, text in (
            ("channels_last", "weights of convolutions lie channels last"),
            ("compile", "models are compiled"),
        )
        if changes.get(name)
    ]
    if mode := changes.get("autocast"):
        said.append("no autocast" if mode == "off" else f"models run under autocast to {mode}")
    if steps := changes.get("accumulate"):
        said.append(f"gradients of {steps} steps are summed up")
    if factor := changes.get("batch"):
        said.append(f"batches of {factor:g} times as many samples")
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
