"""States of whole parameters: gathered on rank 0, one after another, or each rank's own part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..._torch.checkpoint import Wanted
from ..engine import Engine
from ..layout.cuts import Bucket
from ..layout.slots import Slot
from ..transport.group import Pending
from .sliced import SlicedState, cut_state

States = defaultdict[Tensor, dict[str, Any]]


def states_for(engine: Engine, wanted: Wanted) -> States:
    """The states by whole parameters; a collective.

    Raises:
        RuntimeError: a rank did not call it in time. Nothing was sent then.
    """
    engine.group.meet("state_dict()" if wanted == "whole" else f"state_dict() ({wanted})")
    if wanted == "slices":
        return _sliced_states(engine)
    return _whole_states(engine, everywhere=wanted == "whole everywhere")


def _sliced_states(engine: Engine) -> States:
    """Tensors with the elements of this rank, of all parameters that have a state on some rank.

    Before the first step these are new states, to be loaded into.
    """
    states: Mapping[Tensor, dict[str, Any]] = engine.slices.fused.state
    entries_of = _entries_on_all(engine, states)
    if not entries_of:
        states = engine.slices.new_states()
        entries_of = _entries_on_all(engine, states)
    made: States = defaultdict(dict)
    for slot in engine.slots:
        if not (entries := entries_of.get(slot.index)):
            if not engine.slices.has_states(slot):
                made[slot.param] = {}  # as in torch, where such a class has empty states
            continue
        part, own = slot.part, {} if slot.part is None else states[slot.part.values]
        for key, it in entries.items():
            if isinstance(it, torch.dtype):
                mine = None if part is None else (part.begin, own[key].detach().view(-1))
                it = SlicedState(slot.name, slot.shape, slot.strides, it, mine)
            made[slot.param][key] = it if isinstance(it, SlicedState) else own.get(key, it)
    made.update(engine.frozen_states)
    return made


def _entries_on_all(
    engine: Engine, states: Mapping[Tensor, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """The parts of the states of each parameter, by the number of its slot.

    Tensors with an element per element of the parameter are their dtype.
    """
    mine = {
        slot.index: {key: _described(value) for key, value in state.items()}
        for slot in engine.slots
        if slot.part is not None and (state := states.get(slot.part.values))
    }
    found: dict[int, dict[str, Any]] = {}
    for theirs in engine.group.share(mine):
        for index, entries in theirs.items():
            found.setdefault(index, entries)
    return found


def _described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.dtype if value.dim() else value.cpu()  # one on a device would come to it there


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _whole_states(engine: Engine, everywhere: bool) -> States:
    """The states of whole parameters on rank 0, none on the others, or all `everywhere`.

    With replicas it is rank 0 of the first one. Whoever gets them needs room for all of them, and
    rank 0 for a part of one.
    """
    whole: States = defaultdict(dict)
    group = engine.group
    if group.replicas is not None and group.replicas.rank and not everywhere:
        return whole  # the first replica has them too
    entries_of = _entries_on_all(engine, engine.slices.fused.state)
    for bucket in engine.buckets:
        found: dict[Tensor, dict[str, Any]] = {}
        gathered: list[Tensor] = []
        pending: list[Pending] = []
        ranges = _ranges(bucket.layout, group.world)
        for number, slot in enumerate(bucket.slots):
            for key, it in entries_of.get(slot.index, {}).items():
                value: Any = it.clone() if isinstance(it, Tensor) else it
                if isinstance(it, torch.dtype):
                    flat = torch.empty(slot.shape, dtype=it, device=group.device).view(-1)
                    pending += _gather(engine, slot, key, flat, ranges[number])
                    gathered.append(flat)
                    value = flat.as_strided(slot.shape, slot.strides)
                found.setdefault(slot.param, {})[key] = value
        for one in pending:
            one.wait()
        if everywhere:
            group.broadcast(gathered)
        if everywhere or not group.rank:
            whole.update({p: {k: _on_host(v) for k, v in of.items()} for p, of in found.items()})
    if everywhere or not group.rank:
        whole.update(engine.frozen_states)
    return whole


def _ranges(layout: Bucket, world: int) -> dict[int, list[tuple[int, int, int]]]:
    """By the place in the bucket: who owns which elements, as (rank, begin, size)."""
    found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for rank in range(world):
        for place, begin, size, _ in layout.pieces_of(rank):
            found[place].append((rank, begin, size))
    return found


def _gather(
    engine: Engine, slot: Slot, key: str, flat: Tensor, ranges: list[tuple[int, int, int]]
) -> Iterator[Pending]:
    """Let rank 0 put a state together from what the ranks own of it."""
    group, part = engine.group, slot.part
    for rank, begin, size in ranges:
        if part is not None and rank == group.rank:
            mine = engine.slices.fused.state[part.values][key].detach().reshape(-1)
            if rank:
                yield group.send(mine)
            else:
                flat[begin : begin + size] = mine
        elif not group.rank:
            yield group.receive(flat[begin : begin + size], rank)


def drop_missing(states: dict[Tensor, dict[str, Any]]) -> None:
    """Drop what torch.distributed.checkpoint puts in where a flat state dict has no entry."""
    for state in states.values():
        for key in [key for key, value in state.items() if isinstance(value, dict) and not value]:
            del state[key]


def load_states(engine: Engine, states: dict[Tensor, dict[str, Any]]) -> None:
    """Keep this rank's part of the states of whole parameters; a collective.

    Raises:
        RuntimeError: ranks were given states of different parameters, or only some were; a state
            does not fit. Nothing was loaded, on all ranks.
    """
    found = [(slot, states.get(slot.param, {})) for slot in engine.slots]
    problems = [text for slot, state in found if (text := _problem_of(slot, state))]
    lines = [f"{slot.name!r} state of {sorted(state)}" for slot, state in found]
    engine.group.meet("load_state_dict()")
    engine.group.check_alike([*lines, problems[0] if problems else ""], "load_state_dict()")
    if problems:
        raise RuntimeError(f"load_state_dict(): {problems[0]}; nothing was loaded")
    cut_states(engine, states)


def _problem_of(slot: Slot, state: Mapping[str, Any]) -> str:
    """Why the state of a parameter cannot be cut for this rank; "" if it can."""
    for key, value in state.items():
        if not isinstance(value, Tensor) or key == "step" or not value.dim():
            continue
        if value.shape != slot.param.shape:
            return (
                f"{key!r} of {slot.name!r} has the shape {tuple(value.shape)}, and the parameter "
                f"{tuple(slot.param.shape)}"
            )
        if isinstance(value, SlicedState):
            wanted = slot.part and (slot.part.begin, slot.part.values.numel())
            found = value.part and (value.part[0], value.part[1].numel())
            if wanted != found or value.stride() != slot.strides:
                return (
                    f"{key!r} of {slot.name!r} was cut for other slices; load it by "
                    "torch.distributed.checkpoint, or take whole states "
                    "(StateDictOptions(full_state_dict=True))"
                )
    return ""


def cut_states(engine: Engine, states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Give this rank's optimizer its part of the states of whole parameters."""
    cut: dict[Tensor, dict[str, Any]] = {}
    for slot in engine.slots:
        cut.update(cut_state(engine.slices.fused, slot, states.get(slot.param, {})))
    mine = engine.slices.fused.state
    mine.clear()
    mine.update(cut)
    sharded = {id(slot.param) for slot in engine.slots}
    engine.frozen_states = {
        param: state for param, state in states.items() if id(param) not in sharded
    }
    engine.slices.forget()
