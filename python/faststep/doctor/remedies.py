"""Remedies that may help whatever the cause is, and the names by which a user chooses some."""

from __future__ import annotations

import ctypes.util
from collections.abc import Collection, Iterator
from typing import Any

from ..run import PARTS

# The names of remedies that are switched between steps, and tried in runs of their own.
FASTSTEPS, FLUSHED, KEPT = "faststep's optimizer", "denormals are zero", "memory is kept"
FROZEN, TO_NONE, OURS = "objects are frozen", "gradients set to None", "faststep's DataLoader"
TUNED, TF32, NOTHING = "cudnn.benchmark", "products in TF32", "nothing"
ALL, EVERYTHING = "all of `run`", {"parts": list(PARTS)}

ASKED_FOR = ("compile", "checkpointing", "accumulation")  # alone: that takes minutes, or is slower
KINDS = (
    *PARTS,  # of `run`; threads are one of them
    *("denormals", "loader", "samples", "ddp", "zero-grad", "garbage", "cudnn", "tf32"),
    *("autocast", "channels-last", "batch", "sharding", "allocator"),
    *ASKED_FOR,
)
_NAMES = {
    "flush": "denormals",
    "keep_samples": "samples",
    "channels_last": "channels-last",
    "set_to_none": "zero-grad",
    "freeze": "garbage",
    "cudnn_benchmark": "cudnn",
    "checkpoint_blocks": "checkpointing",
    "shard": "sharding",
    "preload": "allocator",
    "accumulate": "accumulation",
}
DEEP = 8  # batches that a worker loads ahead
COMPUTES = 0.3  # of a step: forward and backward, from which their speed matters
FASTER = 1.2  # products in bfloat16
CONVOLVES = 0.3  # of all operations


def is_chosen(change: dict[str, Any], only: Collection[str]) -> bool:
    """True if a user who has named some kinds of remedies, or none, wants a change to be tried."""
    kinds = {_NAMES.get(key, key) for key in change.keys() - {"parts"}}
    kinds |= set(change.get("parts", ()))
    if only:
        return kinds <= set(only)
    return kinds.isdisjoint(ASKED_FOR) and change.get("batch", 1.0) >= 1.0


def for_loaders(workers: int, is_pageable: bool, cores: int) -> dict[str, dict[str, Any]]:
    """What may feed a loop faster than a loader with these workers, and batches for a device."""
    made: dict[str, dict[str, Any]] = {}
    if workers < cores:
        options = {"num_workers": cores, "persistent_workers": True}
        made[f"num_workers={cores}"] = {"loader": options}
    made[OURS] = {"parts": ["data"]}
    if workers:
        made[f"prefetch_factor={DEEP}"] = {"loader": {"prefetch_factor": DEEP}}
    if is_pageable:
        made["pin_memory=True"] = {"loader": {"pin_memory": True}}
    return made


def general(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names and changes of what may help a script, whatever takes its time."""
    yield ALL, EVERYTHING
    if found["cuda"]:
        yield TUNED, {"cudnn_benchmark": True}
        yield TF32, {"tf32": True}
    if found["is_ddp"]:
        yield "a sharded optimizer", {"shard": 2}
    for name, library in _allocators():
        yield name, {"preload": library}
    yield from _computing(found)
    has_batches = any(use["batch"] for use in found["loaders"])
    if has_batches:
        yield "batches half as large", {"batch": 0.5}
    yield "compiled models", {"compile": True}
    yield "checkpointed blocks", {"checkpoint_blocks": True}
    if has_batches:
        both = {"checkpoint_blocks": True, "batch": 2.0}
        yield "checkpointed blocks, batches twice as large", both
    yield "gradients of two steps", {"accumulate": 2}


def _computing(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those for scripts that compute most of the time."""
    phases, machine = found["phases"], found["machine"]
    computing = phases.get("forward", 0.0) + phases.get("backward", 0.0)
    if computing < COMPUTES * sum(found["steps"]) or not machine:
        return
    if machine["convolutions"] > CONVOLVES * machine["operations"]:
        yield "channels last", {"channels_last": True}
    if not found["autocast"] and machine["bf16"] > FASTER * machine["fp32"]:
        yield "autocast to bf16", {"autocast": "bf16"}
    if any(use["batch"] for use in found["loaders"]):
        yield "batches twice as large", {"batch": 2.0}


def _allocators() -> Iterator[tuple[str, str]]:
    """The names and files of allocators that are installed."""
    for names in (("tcmalloc", "tcmalloc_minimal"), ("jemalloc",)):
        library = next(filter(None, map(ctypes.util.find_library, names)), None)
        if library is not None:
            yield names[0], library
