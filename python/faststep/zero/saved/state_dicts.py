"""State dicts of a sharded optimizer.

States of whole parameters are gathered on rank 0, one bucket after another, or each rank gives its
own part.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..._torch.checkpoint import Wanted, wanted_states
from ...grads.params import params_of
from ...optim.base import FusedOptimizer
from ...optim.codes import SCALES, are_codes, shown
from ...optim.load_states import before_hooks, hide_options, loading_states, show_plain
from ...optim.masters import MASTER, StateFormats, complete_states, joined, put_scales
from ...optim.param_shards import shard_of
from ...optim.step import states_on_host
from ..engine import Engine
from ..hooks.gradient_buckets import GradientBucket
from ..layout.slots import Slot
from ..transport.group import Group
from .sliced import SlicedState, cut_state

States = defaultdict[Tensor, dict[str, Any]]


class StateDicts(Optimizer):
    """The part of a sharded optimizer that gathers states, and cuts those that it is given."""

    _engine: Engine | None
    _group: Group | None
    _owned: FusedOptimizer
    _consolidated: States | None = None  # until the next step or load: what `state_dict` gives

    def state_dict(self, native: bool = False) -> dict[str, Any]:
        """The whole state in torch's format on rank 0; without states on the others.

        States in 8 bits are float32, and remainders are masters. With `native` both stay, for
        optimizers of faststep alone, beside the model's parameters as they are then; at stage 3,
        where they are DTensors, for as many ranks.

        A collective: all ranks must call it. Rank 0 holds the states of all parameters in CPU
        memory for as long as the result lives; they come bucket by bucket.

        torch.distributed.checkpoint, with its functions for state dicts, gets each rank's own part
        on every rank instead, without gathering. It saves and loads that at any number of ranks.

        After `consolidate_state_dict` it is no collective.
        """
        if self._engine is None:
            with self._on_host():
                complete_states(self._owned)
                show = functools.partial(show_plain, self._owned, native=native)
                return before_hooks(self, super().state_dict, show)
        wanted, whole = wanted_states(), self._consolidated
        if whole is None or wanted is not None or native:
            self._prepare_states()
            whole = _states_for(self._engine, wanted or "whole", native)
        mine = self.state
        self.state = defaultdict(dict, {p: whole[p] for p in params_of(self) if p in whole})
        try:
            hide = functools.partial(hide_options, self._owned)
            return before_hooks(self, super().state_dict, hide)
        finally:
            self.state = mine

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on one rank, for a `state_dict()` that this rank alone calls.

        A collective, as ZeroRedundancyOptimizer's. Until the next step `state_dict()` gives what
        was gathered on this rank, and no states on the others.

        Args:
            to: the rank in the process group. Default: 0.

        Raises:
            ValueError: there is no such rank.
            RuntimeError: a rank did not call it in time; the optimizer is of stage 3, where
                torch.distributed.checkpoint.state_dict gathers states.
        """
        if self._group is None:
            return
        if not 0 <= to < self._group.world:
            raise ValueError(f"consolidate_state_dict(): to={to}, of {self._group.world} ranks")
        if self._engine is None:
            raise RuntimeError(
                "consolidate_state_dict() is for stages 1 and 2: at stage 3 call "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict() with "
                "StateDictOptions(full_state_dict=True, cpu_offload=True) on all ranks"
            )
        self._prepare_states()
        whole = _states_for(self._engine, "whole" if to == 0 else "whole everywhere")
        self._consolidated = whole if self._engine.group.rank == to else defaultdict(dict)

    def _prepare_states(self) -> None:
        """Before states are read: have them, and the parameters, complete."""
        assert self._engine is not None
        self._engine.follow_groups()
        self._engine.slices.take_options()
        complete_states(self._owned)
        self._engine.wait(None)
        self._engine.follow_moves()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of an optimizer of this class or of the one that was sharded.

        It may come from any number of ranks, or from one process that did not shard. A collective;
        every rank passes the same dict.

        Raises:
            ValueError: torch's errors for groups that do not fit.
            RuntimeError: only some ranks have states, as where each passes its own state_dict().
        """
        groups, mine = self.param_groups, self.state
        self._consolidated = None
        if self._engine is None:
            with self._on_host(), loading_states(self, self._owned):
                super().load_state_dict(state_dict)
        else:
            self._engine.wait(None)
            self._engine.follow_groups()
            self._engine.follow_moves()
            self.state = defaultdict(dict)
            parts = ((s.param, s.part.values) for s in self._engine.slots if s.part is not None)
            own = {param: self._owned.state.get(part, {}) for param, part in parts}
            try:
                with loading_states(self, self._owned, fits=False, own=own):
                    super().load_state_dict(state_dict)
                _drop_missing(self.state)
                self._complete_loaded()
                _load_states(self._engine, self.state)
            except BaseException:
                self.param_groups = groups
                raise
            finally:
                self.state = mine
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups
        if self._engine is None:
            self._owned.__setstate__({})

    @contextlib.contextmanager
    def _on_host(self) -> Iterator[None]:
        """Inside, parameters of a single process are where their states are."""
        self._owned.param_groups = self.param_groups
        try:
            with states_on_host(self._owned):
                self.state = self._owned.state
                try:
                    yield
                finally:
                    self._owned.param_groups, self._owned.state = self.param_groups, self.state
        finally:
            self.state = self._owned.state

    def _complete_loaded(self) -> None:
        """Add what older versions of torch did not save, as the class does that was sharded."""
        kind = type(self._owned)
        kind.__new__(kind).__setstate__(
            {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a sharded optimizer cannot be pickled or copied: it holds this rank's part only; save "
            "its state_dict(), which gathers all parts"
        )


def _states_for(engine: Engine, wanted: Wanted, native: bool = False) -> States:
    """The states by whole parameters; a collective."""
    engine.group.meet("state_dict()" if wanted == "whole" else f"state_dict() ({wanted})")
    if wanted == "slices":
        return _sliced_states(engine)
    return _whole_states(engine, wanted == "whole everywhere", native)


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
            if not engine.slices.keys_of(slot.param):
                made[slot.param] = {}  # as in torch, where such a class has empty states
            continue
        part, own = slot.part, {} if slot.part is None else states[slot.part.values]
        for key, it in entries.items():
            if isinstance(it, torch.dtype):
                mine = None if part is None else (part.begin, _plain(engine, part.values, own, key))
                it = SlicedState(slot.name, slot.shape, slot.strides, it, mine)
            made[slot.param][key] = it if isinstance(it, SlicedState) else own.get(key, it)
    made.update(engine.frozen_states)
    return made


def _entries_on_all(
    engine: Engine, states: Mapping[Tensor, dict[str, Any]], native: bool = False
) -> dict[int, dict[str, Any]]:
    """The parts of the states of each parameter, by the number of its slot.

    Tensors with an element per element of the parameter are their dtype. Codes have no scales here;
    unless `native` they are float32.
    """
    mine = {
        slot.index: {
            key: _described(key, value, native) for key, value in state.items() if key != SCALES
        }
        for slot in engine.slots
        if slot.part is not None and (state := states.get(slot.part.values))
    }
    found: dict[int, dict[str, Any]] = {}
    for theirs in engine.group.share(mine):
        for index, entries in theirs.items():
            found.setdefault(index, entries)
    return found


def _described(key: str, value: Any, native: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not native and (are_codes(value) or (key == MASTER and value.dtype is torch.int16)):
        return torch.float32  # as `_plain` shows it
    return value.dtype if value.dim() else value.cpu()  # one on a device would come to it there


def _plain(engine: Engine, values: Tensor, state: Mapping[str, Any], key: str) -> Tensor:
    """An entry of the state of a part, as torch's class would have it."""
    value: Tensor = shown(state, key, shard_of(engine.slices.fused, values))
    if key == MASTER and value.dtype is torch.int16:
        value = joined(values, value.to(values.device))
    return value.detach().reshape(-1)


def _whole_states(engine: Engine, everywhere: bool, native: bool) -> States:
    """The states of whole parameters on rank 0, none on the others, or all `everywhere`.

    With replicas it is rank 0 of the first one. Whoever gets them needs room for all of them, and
    every rank for one state of a bucket.
    """
    whole: States = defaultdict(dict)
    group = engine.group
    if group.replicas is not None and group.replicas.rank and not everywhere:
        return whole  # the first replica has them too
    entries_of = _entries_on_all(engine, engine.slices.fused.state, native)
    for bucket in engine.buckets:
        entries = [entries_of.get(slot.index, {}) for slot in bucket.slots]
        flats: dict[tuple[str, torch.dtype], Tensor] = {}
        for key, it in itertools.chain.from_iterable(some.items() for some in entries):
            if isinstance(it, torch.dtype) and (key, it) not in flats:
                flats[key, it] = _gathered(engine, bucket, key, it, everywhere)
        scales = _shared_scales(engine, bucket) if native else {}
        if group.rank and not everywhere:
            continue
        for slot, some, place in zip(bucket.slots, entries, bucket.layout.places, strict=True):
            for key, it in some.items():
                if isinstance(it, torch.dtype):
                    it = flats[key, it].as_strided(slot.shape, slot.strides, place.begin)
                whole[slot.param][key] = it.to("cpu", copy=True) if isinstance(it, Tensor) else it
            if slot.index in scales:
                put_scales(whole[slot.param], scales[slot.index])
    if everywhere or not group.rank:
        whole.update(engine.frozen_states)
    return whole


def _shared_scales(engine: Engine, bucket: GradientBucket) -> dict[int, Tensor]:
    """The scales of the parameters of a bucket, by the number of the slot; a collective."""
    states = engine.slices.fused.state
    mine = {
        slot.index: states[slot.part.values][SCALES].cpu()
        for slot in bucket.slots
        if slot.part is not None and SCALES in states.get(slot.part.values, {})
    }
    found: dict[int, list[Tensor]] = {}
    for theirs in engine.group.share(mine):
        for index, scales in theirs.items():
            found.setdefault(index, []).append(scales)
    return {index: torch.cat(parts, 1) for index, parts in found.items()}


def _gathered(
    engine: Engine, bucket: GradientBucket, key: str, dtype: torch.dtype, everywhere: bool
) -> Tensor:
    """A state of the parameters of a bucket, side by side as these are; a collective."""
    group, what = engine.group, "gathering states"
    flat = torch.zeros(bucket.layout.size, dtype=dtype, device=group.device)
    for place, _, count, at in bucket.layout.pieces_of(group.rank):
        part = bucket.slots[place].part
        mine = {} if part is None else engine.slices.fused.state.get(part.values, {})
        if part is not None and key in mine:
            is_plain = dtype.is_floating_point
            flat[at : at + count] = (
                _plain(engine, part.values, mine, key) if is_plain else mine[key].reshape(-1)
            )
    if flat.numel():
        (group.gather(flat, 0, what) if everywhere else group.collect(flat, what)).wait()
    return flat


def _drop_missing(states: dict[Tensor, dict[str, Any]]) -> None:
    """Drop what torch.distributed.checkpoint puts in where a flat state dict has no entry."""
    for state in states.values():
        for key in [key for key, value in state.items() if isinstance(value, dict) and not value]:
            del state[key]


def _load_states(engine: Engine, states: dict[Tensor, dict[str, Any]]) -> None:
    """Keep this rank's part of the states of whole parameters; a collective.

    Raises RuntimeError on all ranks, with nothing loaded, if ranks were given states of different
    parameters, or only some were, or a state does not fit.
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
        if not isinstance(value, Tensor) or key in ("step", SCALES) or not value.dim():
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
    fused = engine.slices.fused
    cut: dict[Tensor, dict[str, Any]] = {}
    formats = StateFormats(fused)
    for slot in engine.slots:
        cut.update(cut_state(fused, formats, slot, states.get(slot.param, {})))
    mine = fused.state
    mine.clear()
    mine.update(cut)
    sharded = {id(slot.param) for slot in engine.slots}
    engine.frozen_states = {
        param: formats.fitting(state, param) if isinstance(param, Tensor) else state
        for param, state in states.items()
        if id(param) not in sharded
    }
    engine.slices.forget()
