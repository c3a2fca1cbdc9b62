"""States of whole parameters, gathered on rank 0 and cut again; a bucket at a time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .engine import Engine
from .slots import Slot
from .states import cut_states

__all__ = ["gather_states", "load_states"]


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


def gather_states(engine: Engine) -> defaultdict[Tensor, dict[str, Any]]:
    """The states of whole parameters on rank 0, none on the others; a collective.

    With replicas it is rank 0 of the first one. Rank 0 needs room for all of them, and for one
    rank's part of one bucket.
    """
    whole: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    replicas = engine.group.replicas
    if replicas is not None and replicas.rank:
        return whole  # the first replica has them too
    for bucket in engine.buckets:
        told = [_told(engine, slot) for slot in bucket.slots]
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


def _told(engine: Engine, slot: Slot) -> list[_Told]:
    told = []
    for (piece, _), begin in zip(slot.pieces, slot.begins, strict=True):
        state = engine.owned.optimizer.state.get(piece)
        if state:
            entries = {
                key: value.dtype if key != "step" and isinstance(value, Tensor) else value
                for key, value in state.items()
            }
            told.append(_Told(slot.index, begin, piece.numel(), entries))
    return told


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
        received[dtype] = torch.empty(size, dtype=dtype)
        engine.group.receive(received[dtype], rank)
    return received


def _unpack(
    engine: Engine,
    told: list[_Told],
    packed: dict[torch.dtype, Tensor],
    whole: defaultdict[Tensor, dict[str, Any]],
) -> None:
    """Copy a rank's parts to where they belong in the states of whole parameters."""
    at = dict.fromkeys(packed, 0)
    for one in told:
        param = engine.slots[one.slot].param
        state = whole[param]
        for key, it in one.entries.items():
            if not isinstance(it, torch.dtype):
                state.setdefault(key, it.clone() if isinstance(it, Tensor) else it)
                continue
            if key not in state:
                state[key] = torch.empty_like(param, dtype=it, requires_grad=False)
            flat = state[key].as_strided((param.numel(),), (1,))
            flat[one.begin : one.begin + one.size] = packed[it][at[it] : at[it] + one.size]
            at[it] += one.size


def load_states(engine: Engine, states: dict[Tensor, dict[str, Any]]) -> None:
    """Keep this rank's part of the states of whole parameters; a collective.

    Raises:
        RuntimeError: ranks were given states of different parameters, or only some were.
    """
    lines = [
        f"{slot.name!r} state of {sorted(states.get(slot.param, {}))}" for slot in engine.slots
    ]
    engine.group.check_alike(lines, "load_state_dict()")
    cut_states(engine, states)
