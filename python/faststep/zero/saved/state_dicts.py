"""state_dict and load_state_dict of a sharded optimizer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from ..._torch.checkpoint import wanted_states
from ...grads.params import params_of
from ...optim.base import FusedOptimizer
from ...optim.load_masters import loading_masters
from ...optim.masters import complete_states
from ..engine import Engine
from ..transport.group import Group
from .gathered import States, drop_missing, load_states, states_for


class StateDicts(Optimizer):
    """The part of a sharded optimizer that gathers states, and cuts those that it is given."""

    _engine: Engine | None
    _group: Group | None
    _owned: FusedOptimizer
    _consolidated: States | None = None  # until the next step or load: what `state_dict` gives

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's format on rank 0; without states on the others.

        A collective: all ranks must call it. Rank 0 holds the states of all parameters in CPU
        memory for as long as the result lives; they come bucket by bucket.

        torch.distributed.checkpoint, with its functions for state dicts, gets each rank's own part
        on every rank instead, without gathering. It saves and loads that at any number of ranks.

        After `consolidate_state_dict` it is no collective.
        """
        if self._engine is None:
            complete_states(self._owned)
            return super().state_dict()
        wanted, whole = wanted_states(), self._consolidated
        if whole is None or wanted is not None:
            self._prepare_states()
            whole = states_for(self._engine, wanted or "whole")
        mine = self.state
        self.state = defaultdict(dict, {p: whole[p] for p in params_of(self) if p in whole})
        try:
            return super().state_dict()
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
        whole = states_for(self._engine, "whole" if to == 0 else "whole everywhere")
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
            with loading_masters(self, self._owned._keeps_masters):
                super().load_state_dict(state_dict)
            self._owned.state = self.state
        else:
            self._engine.wait(None)
            self._engine.follow_groups()
            self._engine.follow_moves()
            self.state = defaultdict(dict)
            try:
                with loading_masters(self, self._owned._keeps_masters):
                    super().load_state_dict(state_dict)
                drop_missing(self.state)
                self._complete_loaded()
                load_states(self._engine, self.state)
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
