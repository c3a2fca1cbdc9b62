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
    for name, (change, _) in _CHANGES.items():
        if value := changes.get(name):
            change(value)
    if changes.keys() & {"loader", "batch", "keep_samples"}:
        _wrap(DataLoader, functools.partial(_of_loader, changes))


def summary(changes: Changes) -> str:
    """The work of `make_changes`, for a line of a report."""
    said = [say(value) for name, (_, say) in _CHANGES.items() if (value := changes.get(name))]
    return "; ".join(said)


def preloading(library: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that loads a library first."""
    before = variables.get("LD_PRELOAD", "")
    return {**variables, "LD_PRELOAD": f"{library} {before}".strip()}


def zero_to_none(is_on: bool) -> None:
    """Let `zero_grad` set gradients to None, whatever it is asked; or no longer."""
    kinds: tuple[Any, ...] = (torch.optim.Optimizer, torch.nn.Module)
    for kind in kinds:
        zero = kind.zero_grad
        kind.zero_grad = _with_none(zero) if is_on else zero.__wrapped__


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


def _set_threads(count: int) -> None:
    torch.set_num_threads(count)
    torch.set_num_threads = lambda count: None  # type: ignore[assignment]


def _set_autocast(mode: str) -> None:
    if mode == "off":
        _wrap(torch.autocast, lambda args, kwargs: (args, {**kwargs, "enabled": False}))
    else:
        forward.autocast(torch.bfloat16)


def _give_ddp(options: dict[str, Any]) -> None:
    _wrap(DistributedDataParallel, lambda args, kwargs: (args, {**kwargs, **options}))


def _named(options: dict[str, Any]) -> str:
    return "; ".join(f"{name}={value}" for name, value in options.items())


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


# What makes a change, and what a report says of it, both from its value.
_CHANGES: dict[str, tuple[Callable[[Any], object], Callable[[Any], str]]] = {
    "loader": (bool, _named),
    "ddp": (_give_ddp, _named),
    "threads": (_set_threads, "{} threads".format),
    "flush": (torch.set_flush_denormal, "denormal numbers are zero".format),
    "channels_last": (
        lambda _: forward.use_channels_last(),
        "weights of convolutions lie channels last".format,
    ),
    "compile": (lambda _: forward.compile_models(), "models are compiled".format),
    "set_to_none": (zero_to_none, "gradients are set to None".format),
    "freeze": (lambda _: forward.freeze_objects(), "objects are frozen".format),
    "cudnn_benchmark": (tune_convolutions, "cudnn.benchmark".format),
    "tf32": (use_tf32, "products in TF32".format),
    "checkpoint_blocks": (
        lambda _: forward.checkpoint_blocks(),
        "blocks are computed again in backward".format,
    ),
    "shard": (forward.shard_models, "states and gradients are spread over ranks".format),
    "autocast": (
        _set_autocast,
        lambda mode: "no autocast" if mode == "off" else f"models run under autocast to {mode}",
    ),
    "accumulate": (forward.accumulate, "gradients of {} steps are summed up".format),
    "batch": (bool, "batches of {:g} times as many samples".format),
    "keep_samples": (bool, "samples are kept in memory".format),
    "preload": (bool, "{} allocates".format),
}
