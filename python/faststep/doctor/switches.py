"""The remedies that can be turned on and off while a script trains, on the objects that it has."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .. import memory
from ..run.changes import tune_convolutions, use_tf32, zero_to_none
from ..run.cores import counted
from ..run.optimizers import CLASSES
from ..run.swaps import CLIPPING, LOSS, SCALERS
from .alternation import Switch
from .findings import FAULT, LEAST, OPTIMIZER
from .remedies import (
    ALL,
    EVERYTHING,
    FASTSTEPS,
    FLUSHED,
    FROZEN,
    KEPT,
    NOTHING,
    OURS,
    TF32,
    TO_NONE,
    TUNED,
    is_chosen,
)
from .second_loader import ScriptLoaders

LEAST_SHARE = 0.04  # of a step, in which a switch must have something to gain
SAME_BATCH, NO_OPTIMIZER = "one batch again and again", "no optimizer"
SCALES, CLIPS = "faststep's GradScaler", "faststep's clipping"
Turn = Callable[[bool], object]


def switches(
    found: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
    loop: ScriptLoaders,
    stepped: Callable[[Optimizer], object],
    only: Collection[str] = (),
) -> list[Switch]:
    """Those that may gain something for a script, and one that changes nothing; dearest first.

    Args:
        found: what was measured of it.
        optimizers: that it steps.
        loop: what gives it batches.
        stepped: is told of a step that is left out.
        only: kinds of remedies, as for `is_chosen`.
    """
    total = sum(found["steps"])
    shares = {phase: spent / total for phase, spent in found["phases"].items()}
    cores, threads = found["cores"], torch.get_num_threads()
    updating = sum(shares.get(phase, 0.0) for phase in ("optimizer", "clipping", "scaler"))
    ours = [_exchange(optimizers), _exchange_scalers(), _exchange_functions(CLIPPING)]
    loaders = loop.switches(cores) if shares.get("data", 0.0) > LEAST_SHARE else []
    chosen = [Switch(NOTHING, lambda is_on: None), _everything(ours, loaders, shares, cores)]
    if found["faults"] * FAULT > LEAST_SHARE and not memory.stats().retains:
        chosen.append(Switch(KEPT, _keep_memory, {"parts": ["memory"]}))
    for count in {1, cores}:
        if count < threads:
            chosen.append(Switch(counted(count), _set_threads(count, threads), {"threads": count}))
    if updating > LEAST_SHARE:
        chosen.append(Switch(FASTSTEPS, _together(ours), OPTIMIZER[FASTSTEPS]))
    chosen += loaders
    chosen.append(Switch(FLUSHED, torch.set_flush_denormal, {"flush": True}, True))
    if shares.get("scaler", 0.0) > LEAST:
        chosen.append(Switch(SCALES, ours[1], {"parts": ["amp"]}))
    if shares.get("clipping", 0.0) > LEAST:
        chosen.append(Switch(CLIPS, ours[2], {"parts": ["clip"]}))
    if found["zeroes"]:
        chosen.append(Switch(TO_NONE, zero_to_none, {"set_to_none": True}))
    if found["collecting"] > LEAST_SHARE and not gc.get_freeze_count():
        chosen.append(Switch(FROZEN, _freeze, {"freeze": True}))
    if found["cuda"]:
        chosen.append(Switch(TUNED, tune_convolutions, {"cudnn_benchmark": True}))
        chosen.append(Switch(TF32, use_tf32, {"tf32": True}))
    if shares.get("data", 0.0) > LEAST_SHARE:
        chosen.append(Switch(SAME_BATCH, loop.repeat, {"loader": {}}))
    if shares.get("optimizer", 0.0) > LEAST_SHARE:
        without = _leave_out(optimizers, stepped)
        chosen.append(Switch(NO_OPTIMIZER, without, {"parts": ["optim"]}))
    chosen = [one for one in chosen if is_chosen(one.change, only)]
    return chosen if len(chosen) > 1 else []


def _everything(
    ours: Sequence[Turn], loaders: Sequence[Switch], shares: Mapping[str, float], cores: int
) -> Switch:
    """All that `run` does."""
    turns = [*ours, _exchange_functions(LOSS)]
    if not memory.stats().retains:
        turns.append(_keep_memory)
    if cores < torch.get_num_threads():
        turns.append(_set_threads(cores, torch.get_num_threads()))
    loader = next((one for one in loaders if one.name == OURS), None)
    if loader is not None:
        return Switch(ALL, _together([*turns, loader.turn]), EVERYTHING, skipped=loader.skipped)
    is_whole = shares.get("data", 0.0) <= LEAST_SHARE
    return Switch(ALL if is_whole else f"{ALL} but its loader", _together(turns), EVERYTHING)


def _together(turns: Sequence[Turn]) -> Turn:
    def turn(is_on: bool) -> None:
        for one in turns:
            one(is_on)

    return turn


def _set_threads(count: int, before: int) -> Turn:
    return lambda is_on: torch.set_num_threads(count if is_on else before)


def _freeze(is_on: bool) -> None:
    if is_on:
        gc.freeze()
    else:
        gc.unfreeze()


def _keep_memory(is_on: bool) -> None:
    if is_on:
        memory.retain()
    else:
        memory.undo()


def _exchange(optimizers: Sequence[Optimizer]) -> Turn:
    """Let optimizers of torch have the steps of faststep's classes, on the same states."""
    known = [one for one in optimizers if type(one) in CLASSES]
    for kind in {type(one) for one in known}:
        CLASSES[kind]([torch.zeros(1, requires_grad=True)])  # which lets torch's hooks run
        CLASSES[kind]._is_for_torch = lambda *what: True  # as under `run`
    return _together([_exchange_classes(known, CLASSES), _beside(known, lambda optimizer: None)])


def _exchange_scalers() -> Turn:
    """Let scalers of torch have the methods of faststep's, on the same states."""
    found = [one for one in gc.get_objects() if type(one) in SCALERS]
    return _exchange_classes(found, SCALERS)


def _exchange_classes(objects: Sequence[Any], classes: Mapping[type, type]) -> Turn:
    kinds = [type(one) for one in objects]

    def turn(is_on: bool) -> None:
        for one, kind in zip(objects, kinds, strict=True):
            one.__class__ = classes[kind] if is_on else kind

    return turn


def _exchange_functions(pairs: Mapping[Any, Any]) -> Turn:
    """Let all modules that have a function of torch have faststep's."""
    ours = {id(torchs): other for torchs, other in pairs.items()}
    places = [
        (names, name, value)
        for module in [*sys.modules.values()]
        for names in [getattr(module, "__dict__", {})]
        if not str(names.get("__name__")).startswith("faststep.")  # which call torch's
        for name, value in [*names.items()]
        if id(value) in ours
    ]

    def turn(is_on: bool) -> None:
        for names, name, torchs in places:
            names[name] = ours[id(torchs)] if is_on else torchs

    return turn


def _leave_out(optimizers: Sequence[Optimizer], stepped: Callable[[Optimizer], object]) -> Turn:
    """Let steps do nothing but call a closure."""

    def made(optimizer: Optimizer) -> Callable[..., Any]:
        def step(closure: Callable[[], Any] | None = None) -> Any:
            loss = None if closure is None else closure()
            stepped(optimizer)
            return loss

        return step

    return _beside(optimizers, made)


def _beside(
    optimizers: Sequence[Optimizer],
    made: Callable[[Optimizer], Callable[..., Any] | None],
) -> Turn:
    """Let optimizers have another `step` while a switch is on; that of their class for None."""
    before = [vars(one).get("step") for one in optimizers]  # what a scheduler has put there
    steps = [made(one) for one in optimizers]

    def turn(is_on: bool) -> None:
        for optimizer, own, other in zip(optimizers, before, steps, strict=True):
            step = other if is_on else own
            if step is not None:
                optimizer.step = step  # type: ignore[method-assign]
            elif "step" in vars(optimizer):
                delattr(optimizer, "step")

    return turn
