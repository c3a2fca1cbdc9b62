"""Remedies that may help whatever the cause is, and the names by which a user chooses some."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ..run import PARTS

__all__ = ["FASTSTEPS", "FLUSHED", "KEPT", "KINDS", "general", "is_chosen"]

# The names of remedies that are switched between steps, and tried in runs of their own.
FASTSTEPS, FLUSHED, KEPT = "faststep's optimizer", "denormals are zero", "memory is kept"

KINDS = (
    *PARTS,  # of `run`; threads are one of them
    *("denormals", "loader", "samples", "ddp"),
    *("autocast", "channels-last", "batch", "compile"),
)
_NAMES = {"flush": "denormals", "keep_samples": "samples", "channels_last": "channels-last"}
ASKED_FOR = {"compile"}  # alone: that takes minutes
COMPUTES = 0.3  # of a step: forward and backward, from which their speed matters
FASTER = 1.2  # products in bfloat16
CONVOLVES = 0.3  # of all operations


def is_chosen(change: dict[str, Any], only: Collection[str]) -> bool:
    """True if a user who has named some kinds of remedies, or none, wants a change to be tried."""
    kinds = {_NAMES.get(key, key) for key in change.keys() - {"parts"}}
    kinds |= set(change.get("parts", ()))
    return kinds <= set(only) if only else not kinds & ASKED_FOR


def general(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names and changes of what may help a script, whatever takes its time."""
    yield "all of `run`", {"parts": list(PARTS)}
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
    yield "compiled models", {"compile": True}
