"""States of whole parameters: gathered on rank 0, a bucket at a time, or each rank's own part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._torch.checkpoint import Wanted
from ..engine import Engine
from ..layout.slots import Slot
from .cutting import cut_state, problem_of
from .sliced import SlicedState

__all__ = ["States", "cut_states", "drop_missing", "load_states", "states_for"]

States = defaultdict[Tensor, dict[str, Any]]


class _Told(NamedTuple):
    """What a rank says of the state of one of its pieces."""

    slot: int
    begin: int
    size: int
    entries: dict[str, Any]  # the dtype of those with an element per element of the piece

    @property
    def parts(self) -> list[tuple[str, torch.dtype]]:
        """The entries that have an element per element of the piece."""
        return [(key, it) for key, it in self.entries.items() if isinstance(it, torch.dtype)]


def states_for(engine: Engine, wanted: Wanted) -> States:
    """The states by whole parameters; a collective.

    Raises:
        RuntimeError: a rank did not call it in time. Nothing was sent then.
    """
    engine.group.meet("state_dict()" if wanted == "whole" else f"state_dict() ({wanted})")
    if wanted == "slices":
        return _sliced_states(engine)
    whole = _gather_states(engine)
    if wanted == "whole everywhere":
        _spread(engine, whole)
    return whole


def _sliced_states(engine: Engine) -> States:
    """Tensors with the elements of this rank, of all parameters that have a state on some rank.

    Before the first step these are new states, to be loaded into.
    """
    states: Mapping[Tensor, dict[str, Any]] = engine.owned.optimizer.state
    entries_of = _entries_on_all(engine, states)
    if not entries_of:
        states = engine.owned.new_states()
        entries_of = _entries_on_all(engine, states)
    made: States = defaultdict(dict)
    for slot in engine.slots:
        if not (entries := entries_of.get(slot.index)):
            if not engine.owned.has_states(slot):
                made[slot.param] = {}  # as in torch, where such a class has empty states
            continue
        own = [
            (begin, states[piece])
            for (piece, _), begin in zip(slot.pieces, slot.begins, strict=True)
        ]
        for key, it in entries.items():
            made[slot.param][key] = (
                SlicedState(
                    slot.name, slot.shape, slot.strides, it,
                    [(begin, state[key].detach().view(-1)) for begin, state in own],
                )
                if isinstance(it, torch.dtype)
                else own[0][1][key] if own else it
            )  # fmt: skip
    made.update(engine.frozen_states)
    return made


def _entries_on_all(
    engine: Engine, states: Mapping[Tensor, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """What the states of each parameter are made of, by the number of its slot."""
    mine = {one.slot: one.entries for slot in engine.slots for one in _told(states, slot)}
    found: dict[int, dict[str, Any]] = {}
    for theirs in engine.group.share(mine):
        for index, entries in theirs.items():
            found.setdefault(index, entries)
    return found


def _spread(engine: Engine, whole: States) -> None:
    """Give all ranks the whole states that rank 0 has."""
    described = {
        slot.index: _entries(whole[slot.param]) for slot in engine.slots if slot.param in whole
    }
    for index, entries in engine.group.share(described)[0].items():
        slot = engine.slots[index]
        state = whole[slot.param]
        for key, it in entries.items():
            if not isinstance(it, torch.dtype):
                state.setdefault(key, it)
                continue
            if key not in state:
                state[key] = _empty(slot, it)
            engine.group.broadcast([state[key]])
    whole.update(engine.frozen_states)


def _empty(slot: Slot, dtype: torch.dtype) -> Tensor:
    """A state of a whole parameter, with any values."""
    return torch.empty_strided(slot.shape, slot.strides, dtype=dtype, device="cpu")


def drop_missing(states: dict[Tensor, dict[str, Any]]) -> None:
    """Drop what torch.distributed.checkpoint puts in where a flat state dict has no entry."""
    for state in states.values():
        for key in [key for key, value in state.items() if isinstance(value, dict) and not value]:
            del state[key]


def _gather_states(engine: Engine) -> States:
    """The states of whole parameters on rank 0, none on the others; a collective.

    With replicas it is rank 0 of the first one. Rank 0 needs room for all of them, and for one
    rank's part of one bucket.
    """
    whole: States = defaultdict(dict)
    replicas = engine.group.replicas
    if replicas is not None and replicas.rank:
        return whole  # the first replica has them too
    states = engine.owned.optimizer.state
    for bucket in engine.buckets:
        told = [_told(states, slot) for slot in bucket.slots]
        mine = [one for some in told for one in some]
        everyone = engine.group.collect(mine)
        if everyone is None:
            for values in _packed(engine, mine).values():
                engine.group.send(values)
            continue
        for rank, theirs in enumerate(everyone):
            packed = _packed(engine, theirs) if rank == 0 else _received(engine, rank, theirs)
            _unpack(engine, theirs, packed, whole)
    if engine.group.rank == 0:
        whole.update(engine.frozen_states)
    return whole


def _told(states: Mapping[Tensor, dict[str, Any]], slot: Slot) -> list[_Told]:
    told = []
    for (piece, _), begin in zip(slot.pieces, slot.begins, strict=True):
        if state := states.get(piece):
            told.append(_Told(slot.index, begin, piece.numel(), _entries(state)))
    return told


def _entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with dtypes in the place of tensors."""
    return {
        key: value.dtype if isinstance(value, Tensor) and value.dim() else _on_host(value)
        for key, value in state.items()
    }


def _on_host(value: Any) -> Any:
    """What another process may get: a tensor on a device would come to the same one there."""
    return value.cpu() if isinstance(value, Tensor) and value.is_cuda else value


def _packed(engine: Engine, told: list[_Told]) -> dict[torch.dtype, Tensor]:
    """This rank's states of a bucket, one after another, by dtype."""
    rows: dict[torch.dtype, list[Tensor]] = {}
    for one in told:
        slot = engine.slots[one.slot]
        piece = slot.pieces[slot.begins.index(one.begin)][0]
        state = engine.owned.optimizer.state[piece]
        for key, dtype in one.parts:
            rows.setdefault(dtype, []).append(state[key].detach().reshape(-1))
    return {dtype: torch.cat(some) for dtype, some in _sorted(rows)}


def _sorted(rows: dict[torch.dtype, Any]) -> list[tuple[torch.dtype, Any]]:
    return sorted(((d, some) for d, some in rows.items()), key=lambda pair: str(pair[0]))


def _received(engine: Engine, rank: int, told: list[_Told]) -> dict[torch.dtype, Tensor]:
    """What another rank has packed."""
    sizes: dict[torch.dtype, int] = {}
    for one in told:
        for _, dtype in one.parts:
            sizes[dtype] = sizes.get(dtype, 0) + one.size
    received = {}
    for dtype, size in _sorted(sizes):
        received[dtype] = torch.empty(size, dtype=dtype, device=engine.group.device)
        engine.group.receive(received[dtype], rank)
    return received


def _unpack(
    engine: Engine,
    told: list[_Told],
    packed: dict[torch.dtype, Tensor],
    whole: States,
) -> None:
    """Copy a rank's parts to where they belong in the states of whole parameters."""
    at = dict.fromkeys(packed, 0)
    for one in told:
        slot = engine.slots[one.slot]
        state = whole[slot.param]
        for key, it in one.entries.items():
            if not isinstance(it, torch.dtype):
                state.setdefault(key, it.clone() if isinstance(it, Tensor) else it)
                continue
            if key not in state:
                state[key] = _empty(slot, it)
            flat = state[key].as_strided((state[key].numel(),), (1,))
            flat[one.begin : one.begin + one.size] = packed[it][at[it] : at[it] + one.size]
            at[it] += one.size


def load_states(engine: Engine, states: dict[Tensor, dict[str, Any]]) -> None:
    """Keep this rank's part of the states of whole parameters; a collective.

    Raises:
        RuntimeError: ranks were given states of different parameters, or only some were; a state
            does not fit. Nothing was loaded, on all ranks.
    """
    found = [(slot, states.get(slot.param, {})) for slot in engine.slots]
    problems = [text for slot, state in found if (text := problem_of(slot, state))]
    lines = [f"{slot.name!r} state of {sorted(state)}" for slot, state in found]
    engine.group.meet("load_state_dict()")
    engine.group.check_alike([*lines, problems[0] if problems else ""], "load_state_dict()")
    if problems:
        raise RuntimeError(f"load_state_dict(): {problems[0]}; nothing was loaded")
    cut_states(engine, states)


def cut_states(engine: Engine, states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Give this rank's optimizer its part of the states of whole parameters."""
    cut: dict[Tensor, dict[str, Any]] = {}
    for slot in engine.slots:
        cut.update(cut_state(engine.owned, slot, states.get(slot.param, {})))
    mine = engine.owned.optimizer.state
    mine.clear()
    mine.update(cut)
    sharded = {id(slot.param) for slot in engine.slots}
    engine.frozen_states = {
        param: state for param, state in states.items() if id(param) not in sharded
    }
    engine.owned.forget()
