"""Changes of what a script does that its text does not show: threads, workers, precision."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from . import forward


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
        set_to_none: gradients are let go of where they would be set to zero.
        freeze: the garbage collector leaves out what is there when a model trains first.
        cudnn_benchmark: cuDNN tries its algorithms for each shape.
        tf32: fp32 products are computed in TF32.
        checkpoint_blocks: blocks of models are computed again in backward.
        shard: the stage of sharding that models of DistributedDataParallel get.
        preload: a library that a new process loads first, see `preloading`.
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
    set_to_none: bool
    freeze: bool
    cudnn_benchmark: bool
    tf32: bool
    checkpoint_blocks: bool
    shard: Literal[1, 2]
    preload: str


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
    for name, (change, _) in _SWITCHES.items():
        if changes.get(name):
            change()
    if stage := changes.get("shard"):
        forward.shard_models(stage)
    if steps := changes.get("accumulate"):
        forward.accumulate(steps)
    if ddp := changes.get("ddp"):
        _wrap(DistributedDataParallel, lambda args, kwargs: (args, {**kwargs, **ddp}))
    if changes.keys() & {"loader", "batch", "keep_samples"}:
        _wrap(DataLoader, functools.partial(_of_loader, changes))


def preloading(library: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that loads a library first."""
    before = variables.get("LD_PRELOAD", "")
    return {**variables, "LD_PRELOAD": f"{library} {before}".strip()}


def zero_to_none() -> Callable[[], None]:
    """Let `zero_grad` set gradients to None, whatever it is asked; returns what undoes it."""
    kinds: list[Any] = [torch.optim.Optimizer, torch.nn.Module]
    before = [kind.zero_grad for kind in kinds]

    def undo() -> None:
        for kind, own in zip(kinds, before, strict=True):
            kind.zero_grad = own

    for kind, own in zip(kinds, before, strict=True):
        kind.zero_grad = _with_none(own)
    return undo


def _with_none(zero: Any) -> Any:
    @functools.wraps(zero)
    def zeroed(self: Any, set_to_none: bool = True) -> None:
        zero(self, set_to_none=True)

    return zeroed


def tune_convolutions(is_on: bool) -> None:
    """Let cuDNN try its algorithms for each shape, or not."""
    torch.backends.cudnn.benchmark = is_on


def use_tf32(is_on: bool) -> None:
    """Let fp32 products on CUDA devices be computed in TF32, or not."""
    torch.set_float32_matmul_precision("high" if is_on else "highest")


# What they do, and what a report says of it.
_SWITCHES: dict[str, tuple[Callable[[], object], str]] = {
    "channels_last": (forward.use_channels_last, "weights of convolutions lie channels last"),
    "compile": (forward.compile_models, "models are compiled"),
    "set_to_none": (zero_to_none, "gradients are set to None"),
    "freeze": (forward.freeze_objects, "objects are frozen"),
    "cudnn_benchmark": (functools.partial(tune_convolutions, True), "cudnn.benchmark"),
    "tf32": (functools.partial(use_tf32, True), "products in TF32"),
    "checkpoint_blocks": (
        forward.checkpoint_blocks,
        "blocks are computed again in backward",
    ),
}


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
    said += [text for name, (_, text) in _SWITCHES.items() if changes.get(name)]
    if changes.get("shard"):
        said.append("states and gradients are spread over ranks")
    if mode := changes.get("autocast"):
        said.append("no autocast" if mode == "off" else f"models run under autocast to {mode}")
    if steps := changes.get("accumulate"):
        said.append(f"gradients of {steps} steps are summed up")
    if factor := changes.get("batch"):
        said.append(f"batches of {factor:g} times as many samples")
    if changes.get("keep_samples"):
        said.append("samples are kept in memory")
    if library := changes.get("preload"):
        said.append(f"{library} allocates")
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
