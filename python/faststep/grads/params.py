"""The parameters of an optimizer: all of them, their gradients, and their names in errors."""

from __future__ import annotations

import itertools
from typing import Any, Protocol, TypeGuard

from torch import Tensor

from .. import _C


class Grouped(Protocol):
    """Any optimizer of torch, as far as its parameters go."""

    param_groups: list[dict[str, Any]]


class Stepped(Grouped, Protocol):
    """An optimizer of faststep.optim, which builds on this folder and is not imported here."""

    @property
    def _devices(self) -> tuple[int, ...]:
        """Those of its parameters, as the C side numbers them."""

    @classmethod
    def _has_own_step(cls) -> bool:
        """True if a subclass has replaced the step."""


def is_ours(optimizer: object) -> TypeGuard[Stepped]:
    """True if this is an optimizer of faststep.optim."""
    return hasattr(type(optimizer), "_has_own_step")


def params_of(optimizer: Grouped) -> list[Tensor]:
    """All parameters, group after group."""
    return list(itertools.chain.from_iterable(g["params"] for g in optimizer.param_groups))


def grads_of(optimizer: Grouped) -> list[Tensor]:
    """The gradients that exist, in the order of the parameters."""
    return _C.collect_grads(params_of(optimizer))


def name_of(optimizer: Grouped, group: int, index: int) -> str:
    """The name that a script has given to a parameter, quoted; without one its place."""
    given = _given_name(optimizer, group, index)
    return f"parameter {index} of group {group}" if given is None else repr(given)


def place_of(group: int, index: int) -> str:
    """A parameter by its place alone."""
    return f"parameter {index} in group {group}"


def described(optimizer: Grouped, group: int, index: int) -> str:
    """A parameter by its place, name, shape, dtype and device."""
    param: Tensor = optimizer.param_groups[group]["params"][index]
    given = _given_name(optimizer, group, index)
    name = "" if given is None else f"'{given}', "
    what = f"{name}shape {tuple(param.shape)}, {param.dtype}, {param.device}"
    return f"{place_of(group, index)} ({what})"


def _given_name(optimizer: Grouped, group: int, index: int) -> str | None:
    """The name of an optimizer that was made of named parameters."""
    names = optimizer.param_groups[group].get("param_names")
    return names[index] if names else None
