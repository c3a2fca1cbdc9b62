"""Finds in the result of a run what costs the script time, and which change would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from ..run.cores import counted
from . import source_lines
from .phases import PHASES
from .remedies import FASTSTEPS, FLUSHED, FROZEN, KEPT, OURS, TO_NONE, for_loaders

LEAST = 0.05  # of a step
FAULT = 1.5e-6  # seconds that a page fault takes in a virtual machine
COPY_RATE = 5e9  # bytes per second that an update moves at least
PASSES = 8  # how often an update reads or writes a parameter's bytes, its states included
SAVED = 0.7  # of the optimizer's share, by a faster one
OFTEN = 20  # steps between two evaluations, or fewer
GROWTH = 4096  # bytes per step
LOOKS = 100  # at a stack, per second
WAITS = {"communication", "backward"}  # phases in which ranks may wait for each other
OF_DDP = {"forward"}  # which has its own in it
OPTIMIZER: dict[str, dict[str, Any]] = {FASTSTEPS: {"parts": ["optim", "amp", "clip"]}}
Found = dict[str, Any]


class Suspect(NamedTuple):
    """A cause that a run makes likely.

    Attributes:
        cause: its fixed name.
        share: of a step, which a remedy would save at most.
        text: one sentence, with the remedy.
        changes: by the names of remedies that can be tried, as the probe takes them.
        line: the place in the script, as "file:line".
        is_error: it ends in an error or a wrong result, whatever it costs.
        needs_trial: it is a finding only if a trial proves it.
        most: the share of a step that remedies can touch; a trial that saves more is noise.
    """

    cause: str
    share: float
    text: str
    changes: dict[str, dict[str, Any]] = {}  # noqa: RUF012
    line: str | None = None
    is_error: bool = False
    needs_trial: bool = True
    most: float = 1.0


def suspects(found: Found) -> list[Suspect]:
    """The likely causes, dearest first."""
    total = sum(found["steps"]) or 1.0
    made: list[Suspect] = []
    for rule in _RULES:
        made += rule(found, total)
    return sorted(made, key=lambda one: (not one.is_error, -one.share))


_RULES: list[Callable[[Found, float], Iterator[Suspect]]] = []


def _rule(function: Callable[[Found, float], Iterator[Suspect]]) -> Any:
    _RULES.append(function)
    return function


def _share(found: Found, total: float, phase: str) -> float:
    return float(found["phases"].get(phase, 0.0)) / total


def _by_chance(share: float, total: float) -> float:
    """What looks for so many seconds may add to a share: two standard deviations."""
    return 2.0 * math.sqrt(share * max(0.0, 1.0 - share) / (LOOKS * total))


def _least(total: float) -> float:
    """What a share of LEAST may seem by chance."""
    return LEAST + _by_chance(LEAST, total)


def _switched(found: Found, name: str, otherwise: float) -> float:
    """The share of a step that a switch has surely saved, if it was tried."""
    gain = found["switched"].get(name)
    return otherwise if gain is None else 1.0 - 1.0 / max(1.0, gain[1])


def _place(entries: Sequence[Any], outer: bool = True) -> str | None:
    """The line that took most, in the loop or where the time was spent."""
    best = next((one for one in entries if one[2 if outer else 1]), None)
    return None if best is None else "{}:{}".format(*best[2 if outer else 1])


def _lines(found: Found, phase: str) -> list[Any]:
    return [entry for entry in found["lines"] if entry[0] == phase]


def _spent_in(
    cause: str, entries: Sequence[Any], total: float, text: str, saved: float = 1.0
) -> Iterator[Suspect]:
    """Time spent in lines of the script, of which a remedy that cannot be tried saves a part."""
    share = sum(entry[3] for entry in entries) / total
    if share >= _least(total):
        line = _place(entries, outer=False)
        yield Suspect(cause, share * saved, text, {}, line, needs_trial=False)


# ---- data


@_rule
def _loaders(found: Found, total: float) -> Iterator[Suspect]:
    data = _share(found, total, "data")
    used = [use for use in found["loaders"] if use["batches"]]
    if not used:
        return
    main = max(used, key=lambda use: use["wait"])
    line = _place(_lines(found, "data"))
    restarted = [use for use in used if use["workers"] and not use["persistent"]]
    starting = sum(
        use["starting"] * (1 - 1 / use["iterators"]) for use in restarted if use["iterators"]
    )
    share = min(starting / total, data)
    keep: dict[str, dict[str, Any]] = {
        "persistent_workers": {"loader": {"persistent_workers": True}}
    }
    keep[OURS] = {"parts": ["data"]}
    if share >= LEAST:
        cause, how = "workers-restarted", "pass persistent_workers=True"
        if any(use["method"] != "fork" for use in restarted):
            cause = "spawn-imports"
            how = f"each imports the script and its modules first: {how}, or fork"
        text = f"every epoch starts the loader's workers again: {how}"
        yield Suspect(cause, share, text, keep, line)
    rest = data - share
    if rest < max(LEAST, share):  # one cause, which both remedies serve
        return
    if main["decodes"] > 0.5 and main["iterators"] > 1:
        text = "each epoch decodes the same samples again, which would fit in memory: keep them"
        changes = {"samples kept in memory": {"keep_samples": True}}
        inner = _place(_lines(found, "data"), outer=False)
        yield Suspect("repeated-decoding", rest, text, changes, inner or line)
        return
    text = f"the loop waits for its DataLoader of {main['workers']} workers"
    needs_trial = share >= LEAST or rest < 3 * LEAST
    yield Suspect("starved-loader", rest, text, _feeds(found), line, needs_trial=needs_trial)


def _feeds(found: Found) -> dict[str, dict[str, Any]]:
    """What may give batches faster; beside the usual, only what has gained between steps."""
    cores = found["cores"]
    usual = {f"num_workers={cores}", OURS}
    uses = [(use["wait"], use["workers"], use["is_pageable"]) for use in found["loaders"]]
    _, workers, is_pageable = max(uses, default=(0.0, cores, False))
    made = for_loaders(workers, is_pageable, cores)
    return {name: how for name, how in made.items() if name in usual or name in found["switched"]}


# ---- the step


@_rule
def _optimizer(found: Found, total: float) -> Iterator[Suspect]:
    by_hand = [
        entry for entry in _lines(found, "everything else") if source_lines.updates(entry[1])
    ]
    text = "parameters are updated one by one in Python: use a class of faststep.optim or torch"
    yield from _spent_in("slow-optimizer", by_hand, total, text, 0.9)
    share = _share(found, total, "optimizer")
    steps = len(found["steps"])
    if share < LEAST or not found["optimizers"] or not steps:
        return
    main = max(found["optimizers"], key=lambda one: one["steps"])
    if main["module"].startswith("faststep."):
        return
    if main["module"].startswith("torch.optim"):
        if share < _share(found, total, "clipping"):
            return  # one cause, which one remedy serves
        text = f"torch's {main['class']} steps {main['tensors']} tensors: faststep's is faster"
        most = share + _share(found, total, "clipping") + _share(found, total, "scaler")
        yield Suspect("slow-optimizer", SAVED * share, text, OPTIMIZER, most=most)
        return
    best = main["bytes"] * PASSES / COPY_RATE / (total / steps)
    text = (
        f"{main['class']} updates its {main['tensors']} tensors one by one in Python: use a class "
        "of torch.optim or faststep.optim with the same formula"
    )
    line = "{}:{}".format(*main["place"])
    if share - best >= LEAST:
        yield Suspect("slow-optimizer", share - best, text, {}, line, needs_trial=False)


@_rule
def _clipping(found: Found, total: float) -> Iterator[Suspect]:
    by_hand = [entry for entry in _lines(found, "everything else") if source_lines.clips(entry[1])]
    text = "gradients are clipped one by one in Python: call torch.nn.utils.clip_grad_norm_"
    yield from _spent_in("slow-clipping", by_hand, total, text, 0.9)
    share, updating = (_share(found, total, phase) for phase in ("clipping", "optimizer"))
    is_torchs = any(one["module"].startswith("torch.optim") for one in found["optimizers"])
    if share >= LEAST and not (is_torchs and updating >= share):
        text = "torch's clipping takes this: faststep's optimizer clips in fewer passes"
        most = share + updating + _share(found, total, "scaler")
        line = _place(_lines(found, "clipping"))
        yield Suspect("slow-clipping", share, text, OPTIMIZER, line, most=most)


# ---- what the loop does beside training


@_rule
def _beside(found: Found, total: float) -> Iterator[Suspect]:
    share = _share(found, total, "checkpoint")
    line = _place(_lines(found, "checkpoint"))
    if share >= _least(total):
        text = "the loop saves checkpoints this often: save fewer, or in a thread"
        yield Suspect("checkpoint-in-loop", share, text, {}, line, needs_trial=False)
    share = _share(found, total, "evaluation")
    if share >= _least(total) and found["evaluated"] * OFTEN >= 1.0:
        text = f"the loop evaluates every {1 / found['evaluated']:.0f} steps: do so more seldom"
        line = _place(_lines(found, "evaluation"))
        yield Suspect("evaluation-in-loop", share, text, {}, line, needs_trial=False)
    shown = [entry for entry in _lines(found, "everything else") if source_lines.prints(entry[1])]
    text = "each step waits for numbers to be shown: do so every hundred steps"
    yield from _spent_in("synchronising", [*_lines(found, "printing"), *shown], total, text)
    read = [entry for entry in _lines(found, "everything else") if source_lines.reads(entry[1])]
    text = "each step reads tensors number by number in Python: compute with whole tensors"
    yield from _spent_in("synchronising", read, total, text)


@_rule
def _communication(found: Found, total: float) -> Iterator[Suspect]:
    last, share = _late(found), _share(found, total, "communication")
    if last is not None:
        yield last
    rest = share if last is None else max(0.0, share - last.share)
    if found["is_ddp"]:
        yield from _exposed_by_ddp(rest)
    if found["is_ddp"] or rest < min(LEAST, share):
        return
    waits = [one for one in _lines(found, "everything else") if source_lines.waits(one[1])]
    by_script = [*_lines(found, "communication"), *waits]
    text = (
        "ranks wait for each other's gradients: wrap the model in DistributedDataParallel, which "
        "sends them during backward"
    )
    yield from _spent_in("exposed-communication", by_script, total, text, rest / (share or 1.0))


def _late(found: Found) -> Suspect | None:
    """The rank but 0 that lets others wait most, if by more than looks at stacks may be wrong."""
    total = sum(found["steps"])
    waits = WAITS | OF_DDP if found["is_ddp"] else WAITS
    own_phases = [phase for phase in PHASES if phase not in waits]
    if not found["ranks"] or not total:
        return None
    shares = {one["rank"]: one["phases"] for one in found["ranks"]}
    shares[0] = {phase: spent / total for phase, spent in found["phases"].items()}
    own = {rank: sum(phases.get(one, 0.0) for one in own_phases) for rank, phases in shares.items()}
    last = max(own, key=own.__getitem__)
    usual = median(share for rank, share in own.items() if rank != last)
    if last == 0 or own[last] - usual < LEAST + _by_chance(own[last], total):
        return None
    others = [phases for rank, phases in shares.items() if rank != last]
    usuals = {phase: median(one.get(phase, 0.0) for one in others) for phase in own_phases}
    phase = max(own_phases, key=lambda one: shares[last].get(one, 0.0) - usuals[one])
    text = (
        f"the others wait for rank {last}, where {phase} takes {shares[last].get(phase, 0.0):.0%} "
        f"of a step and {usuals[phase]:.0%} elsewhere: give all ranks as much to do"
    )
    changes = _feeds(found) if phase == "data" else {}
    return Suspect("uneven-ranks", own[last] - usual, text, changes, needs_trial=False)


def _exposed_by_ddp(share: float) -> Iterator[Suspect]:
    if share >= LEAST:
        text = (
            "backward ends and gradients are still sent: take larger buckets, a static graph, or "
            "accumulate under no_sync()"
        )
        larger: dict[str, Any] = {"bucket_cap_mb": 100, "gradient_as_bucket_view": True}
        changes: dict[str, dict[str, Any]] = {
            "larger buckets": {"ddp": larger},
            "a static graph": {"ddp": {"static_graph": True}},
        }
        yield Suspect("exposed-communication", share, text, changes, needs_trial=share < 3 * LEAST)


# ---- the machine


@_rule
def _machine(found: Found, total: float) -> Iterator[Suspect]:
    cores, threads = found["cores"], found["threads"]
    for count in sorted({1, min(cores, threads)}):
        name = counted(count)
        share = _switched(found, name, 0.5 if threads > cores else 0.0)
        if count < threads and share >= LEAST:
            text = f"torch computes in {threads} threads on {cores} cores: {name} may be faster"
            yield Suspect("too-many-threads", share, text, {name: {"threads": count}})
    share = _switched(found, KEPT, found["faults"] * FAULT)
    if share >= LEAST:
        per_step = found["faults"] * total / len(found["steps"])
        text = (
            f"each step takes {per_step:.0f} pages from the system and gives them back: call "
            "faststep.memory.retain() first"
        )
        yield Suspect("page-faults", share, text, {KEPT: {"parts": ["memory"]}})
    share = _switched(found, FLUSHED, 0.0)
    if share >= LEAST / 2 or any(one["denormals"] > 0 for one in found["optimizers"]):
        text = (
            "tensors have denormal numbers, with which the processor computes slowly: call "
            "torch.set_flush_denormal(True) first"
        )
        yield Suspect("denormals", share, text, {FLUSHED: {"flush": True}})
    for dtype in ("bfloat16", "float16"):
        if found["autocast"].get(dtype):
            text = f"this processor computes slower in {dtype} than in fp32: leave autocast out"
            yield Suspect("slow-bf16", 0.5, text, {"without autocast": {"autocast": "off"}})


@_rule
def _python(found: Found, total: float) -> Iterator[Suspect]:
    share = _switched(found, FROZEN, found["collecting"])
    if share >= LEAST:
        text = (
            "Python's garbage collector goes through all objects again and again: call "
            "gc.freeze() when the model and the data are there"
        )
        yield Suspect("garbage-collector", share, text, {FROZEN: {"freeze": True}})
    share = _switched(found, TO_NONE, 0.0)
    if share >= LEAST:
        text = "gradients are set to zero, and then added to: call zero_grad(set_to_none=True)"
        yield Suspect("zeroed-gradients", share, text, {TO_NONE: {"set_to_none": True}})


# ---- what goes wrong


@_rule
def _errors(found: Found, total: float) -> Iterator[Suspect]:
    steps = len(found["steps"])
    if found["autocast_steps"] and sum(found["autocast"].values()) * 2 < found["autocast_steps"]:
        text = (
            "autocast stays open over optimizer steps: it keeps the weights that it has cast, so "
            "forward uses old ones. Enter it in each step, around forward and loss alone"
        )
        yield Suspect("autocast-held", 0.0, text, is_error=True, needs_trial=False)
    growth = _growth(found["allocated"], steps)
    if found["graph"] is not None and growth > GROWTH and steps > OFTEN:
        name, file, line = found["graph"]
        what = f"{name!r} keeps" if name else "something keeps"
        text = (
            f"{what} the graph of every step, {growth / 1024:.0f} KiB each: add up loss.detach() "
            "or loss.item() instead"
        )
        place = f"{file}:{source_lines.line_of(file, name) or line}" if name else None
        yield Suspect("memory-creep", 0.0, text, line=place, is_error=True, needs_trial=False)


def _growth(allocated: Sequence[int], steps: int) -> float:
    """Bytes per step, over the second half of the steps."""
    half = allocated[len(allocated) // 2 :]
    return 2 * (half[-1] - half[0]) / steps if len(half) > 1 else 0.0
