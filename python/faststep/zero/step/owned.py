"""The optimizer of one rank: a fused step over the pieces of parameters that the rank owns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ... import _C, optim
from ..._devices import devices_of
from ..._torch.optim import method_of_script
from ...grads.params import params_of
from ...optim.base import FusedOptimizer
from ...optim.masters import begin_state, keys_for
from ...optim.request import Rule, StepRequest
from ...optim.step import Stepper
from ...optim.work import Work
from ..layout.slots import Slot

__all__ = ["Kind", "Owned", "OwnedPart", "fused_class_of"]

Kind = Callable[[list[dict[str, Any]]], FusedOptimizer]

_OURS = [kind for name in optim.__all__ if issubclass(kind := getattr(optim, name), FusedOptimizer)]
_FUSED: dict[type[Any], Any] = {
    **{getattr(torch.optim, kind.__name__, kind): kind for kind in _OURS},
    **dict(zip(_OURS, _OURS, strict=True)),
}


def fused_class_of(optimizer: Optimizer) -> Kind:
    """The class whose step makes the same update, with the optimizer's defaults.

    Raises:
        TypeError: there is none, or a script's code is part of the update.
    """
    kind = vars(type(optimizer)).get("_made_from") or type(optimizer)
    base = next((one for one in kind.__mro__ if one in _FUSED), None)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if base is None:
        *known, last = (one.__name__ for one in _OURS)
        raise TypeError(
            f"shard() takes {', '.join(known)} or {last} of torch.optim or faststep.optim, not a "
            f"{name}: what another class does in its step may need whole tensors"
        )
    if method := method_of_script(optimizer, base):
        raise TypeError(
            f"shard(): {name} has a {method} of its own, which would not be called: every rank "
            f"makes the update of {base.__name__} on flat parts of the parameters. Pass an "
            f"optimizer of the class {base.__name__} itself"
        )

    def made(groups: list[dict[str, Any]]) -> FusedOptimizer:
        fused: FusedOptimizer = _FUSED[base](groups)
        fused.defaults = optimizer.defaults  # Adagrad begins a state by them
        return fused

    return made


class OwnedStates(defaultdict[Tensor, dict[str, Any]]):
    """The states of this rank's pieces.

    torch.distributed.checkpoint asks two things of an optimizer's states. It makes a step with
    gradients of zero if there are none; a sharded optimizer gives it new states without one, so
    there always are some. And it asks which states a parameter has.
    """

    def __init__(self, keys_of: Callable[[Tensor], tuple[str, ...] | None]) -> None:
        super().__init__(dict)
        self._keys_of = keys_of

    def __bool__(self) -> bool:
        return True

    def __missing__(self, key: Tensor) -> dict[str, Any]:
        keys = self._keys_of(key)
        return super().__missing__(key) if keys is None else dict.fromkeys(keys)


class Owned:
    """Steps this rank's pieces, with the options of the script's parameter groups.

    Args:
        kind: the optimizer's class.
        keeps_masters: low-precision pieces have fp32 masters.
    """

    def __init__(self, kind: Kind, keeps_masters: bool = False) -> None:
        self.optimizer = kind([{"params": []}])
        self.optimizer._keeps_masters = keeps_masters
        self.optimizer.state = OwnedStates(self._keys_of)
        self._stepper = self.optimizer._stepper = Stepper()
        self._parts: list[OwnedPart] = []
        self.follow([], [])

    def follow(self, groups: list[dict[str, Any]], slots: list[list[Slot]]) -> None:
        """Let the script's groups have other parameters; `slots` are those that are sharded."""
        self.groups = groups
        self.optimizer.param_groups = [
            {
                **_options(group),
                "params": [piece for slot in members for piece, _ in slot.pieces],
                "param_names": [slot.name for slot in members for _ in slot.pieces],
            }
            for group, members in zip(groups, slots, strict=True)
        ]
        self._names = [group["param_names"] for group in self.optimizer.param_groups]
        self._group_of = {
            id(slot.param): number for number, members in enumerate(slots) for slot in members
        }
        self._parts.clear()
        self._stepper.devices = devices_of(params_of(self.optimizer))
        self.forget()

    def _keys_of(self, param: Tensor) -> tuple[str, ...] | None:
        """The names of the states of a parameter that is sharded; None for another tensor."""
        number = self._group_of.get(id(param))
        return None if number is None else keys_for(self.take_options()[number], param)

    def has_states(self, slot: Slot) -> bool:
        """Whether the class keeps states of a parameter."""
        return bool(self._keys_of(slot.param))

    def new_states(self) -> dict[Tensor, dict[str, Any]]:
        """The states that the pieces have before their first step, which get none by this."""
        rules = self.take_options()
        optimizer = self.optimizer
        kept, optimizer.state = optimizer.state, defaultdict(dict)
        try:
            for group, rule in zip(optimizer.param_groups, rules, strict=True):
                for piece in group["params"]:
                    if keys_for(rule, piece):
                        begin_state(optimizer, group, rule, piece)
            return dict(optimizer.state)
        finally:
            optimizer.state = kept

    @property
    def is_empty(self) -> bool:
        """Whether this rank owns nothing."""
        return not any(self._names)

    def take_options(self) -> list[Rule]:
        """The rules of all groups, by what the script's groups say now."""
        optimizer = self.optimizer
        for group, script, names in zip(
            optimizer.param_groups, self.groups, self._names, strict=True
        ):
            group.update(_options(script))
            group["param_names"] = names
        return optimizer._rules()

    def part(self, slots: Sequence[Slot]) -> OwnedPart:
        """What this rank owns of some parameters, to be stepped apart from the others."""
        pieces = {id(piece): piece for slot in slots for piece, _ in slot.pieces}
        groups = self.optimizer.param_groups
        params = [[p for p in group["params"] if id(p) in pieces] for group in groups]
        self._parts.append(OwnedPart(self.optimizer, params))
        return self._parts[-1]

    def step(self, request: StepRequest) -> None:
        """Update the pieces that have a gradient.

        Raises:
            TypeError, RuntimeError, KeyError: a tensor or an option cannot be used; nothing was
                updated on this rank.
        """
        if self.is_empty:
            return
        optimizer = self.optimizer
        self.take_options()
        params = [group["params"] for group in optimizer.param_groups]
        try:
            self._stepper.step(Work(optimizer, params, optimizer._rules), request)
        except _C.TensorError as error:
            raise optimizer._explained(*error.args) from None

    def forget(self) -> None:
        """Let go of states that were replaced."""
        self._stepper.forget()
        for part in self._parts:
            part.forget()


class OwnedPart:
    """Some of the pieces of a rank, with a plan of their own.

    Args:
        optimizer: the one that has their states.
        params: per group, those of its pieces that are stepped.
    """

    def __init__(self, optimizer: FusedOptimizer, params: list[list[Tensor]]) -> None:
        self._optimizer = optimizer
        self._groups = [number for number, pieces in enumerate(params) if pieces]
        self._params = [params[number] for number in self._groups]
        self._stepper = Stepper()

    def step(self, rules: Sequence[Rule]) -> None:
        """Update the pieces that have a gradient, by these rules of all groups.

        Raises:
            TypeError, RuntimeError, KeyError: a tensor or an option cannot be used; none of these
                pieces was updated.
        """
        if not self._params:
            return
        mine = [rules[number] for number in self._groups]
        work = Work(self._optimizer, self._params, lambda: mine, self._groups)
        try:
            self._stepper.step(work, StepRequest())
        except _C.TensorError as error:
            raise self._optimizer._explained(*error.args) from None

    def forget(self) -> None:
        """Let go of states that were replaced."""
        self._stepper.forget()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def set_grads(slots: Sequence[Slot], present: Sequence[bool]) -> None:
    """Let the next step see the gradients of these parameters only."""
    for slot, is_present in zip(slots, present, strict=True):
        for piece, grad in slot.pieces:
            piece.grad = grad if is_present else None
