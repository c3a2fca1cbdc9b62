"""The types of states: of all of an optimizer, or of a parameter group with its own options."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_WORDS: dict[torch.dtype | None, tuple[str, str, str]] = {
    torch.bfloat16: ('"bf16"', "bfloat16 numbers", '0.996 avoids it, or rounding="stochastic"'),
    torch.int8: ('"int8"', "codes", "0.99 avoids it"),
}
GROUP_OPTIONS = frozenset({"state_dtype", "min_8bit_size", "rounding"})  # of a group too


class StateKinds(NamedTuple):
    """How states are kept that have the shape of a parameter."""

    dtype: torch.dtype | None = None  # None: as torch, and fp32 beside masters
    by_name: tuple[tuple[str, torch.dtype | None], ...] = ()  # of single states
    smallest: int = 4096  # elements of a parameter with states in codes, at least
    is_noisy: bool = False  # bf16 states are rounded by noise
    seed: int = 0  # of it
    codes_from: int = 0  # `smallest`, at least 2: a number has no codes; 0: there are none
    noise_seed: int | None = None  # `seed` where there is noise

    def of(self, key: str) -> torch.dtype | None:
        """The type of the states of a name; None for that which torch gives."""
        return dict(self.by_name).get(key, self.dtype) if self.by_name else self.dtype

    def _has(self, dtype: torch.dtype) -> bool:
        return self.dtype is dtype or any(dtype is one for _, one in self.by_name)

    @property
    def is_torchs(self) -> bool:
        """True if states have the types that torch gives, beside masters fp32."""
        return self.dtype is None and not any(dict(self.by_name).values())


AS_TORCH = StateKinds()


class Named(Protocol):
    """A class of optimizers, as far as the names of its states go."""

    _code_dtypes: ClassVar[Mapping[str, torch.dtype]]

    @classmethod
    def _state_names(cls) -> tuple[str, ...]: ...


class Kinded(Named, Protocol):
    """An optimizer, as far as the types of its states go."""

    param_groups: list[dict[str, Any]]
    _kinds: StateKinds
    _made_from: ClassVar[Any]


def kinds_by(
    kind: type[Named],
    before: StateKinds,
    state_dtype: object = None,
    min_8bit_size: Any = None,
    rounding: object = None,
) -> StateKinds:
    """What options ask for; None is what there was `before`.

    Raises:
        ValueError: an option is out of range, or for states that the class does not have so.
    """
    kinds = before
    if isinstance(state_dtype, Mapping):
        by_name = {key: _dtype_of(name) for key, name in state_dtype.items()}
        kinds = kinds._replace(by_name=tuple({**dict(kinds.by_name), **by_name}.items()))
    elif state_dtype is not None:
        kinds = kinds._replace(dtype=_dtype_of(state_dtype), by_name=())
    if min_8bit_size is not None:
        _check_smallest(min_8bit_size)
        kinds = kinds._replace(smallest=min_8bit_size)
    if rounding is not None:
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f'rounding must be "nearest" or "stochastic", not {rounding!r}')
        kinds = kinds._replace(is_noisy=rounding == "stochastic")
    _check(kind, kinds)
    return kinds._replace(
        codes_from=max(2, kinds.smallest) if kinds._has(torch.int8) else 0,
        noise_seed=kinds.seed if kinds.is_noisy else None,
    )


def _dtype_of(name: object) -> torch.dtype | None:
    if name is None or (isinstance(name, str) and name in _DTYPES):
        return None if name is None else _DTYPES[name]
    *names, last = (f'"{known}"' for known in _DTYPES)
    raise ValueError(f"state_dtype must be {', '.join(['None', *names])} or {last}, not {name!r}")


def _check(kind: type[Named], kinds: StateKinds) -> None:
    """Raise ValueError for kinds out of range."""
    seed, coded, names = kinds.seed, set(kind._code_dtypes), kind._state_names()
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise ValueError(f"rounding_seed must be an integer from 0 to 2**64 - 1, not {seed!r}")
    if kinds.is_noisy and not kinds._has(torch.bfloat16):
        raise ValueError('rounding="stochastic" is for states in bf16: pass state_dtype="bf16" too')
    wanted = {key for key, dtype in kinds.by_name if dtype is torch.int8}
    if (kinds.dtype is torch.int8 and not coded) or not wanted <= coded:
        which = ", ".join(map(repr, sorted(wanted - coded)))
        raise ValueError(
            f'{kind.__name__} does not take state_dtype="int8"{which and " of " + which}: Adam, '
            "AdamW, Lion and SGD with momentum do"
        )
    if others := [repr(key) for key, _ in kinds.by_name if key not in names]:
        raise ValueError(
            f"state_dtype has {', '.join(others)}, and the states of {kind.__name__} are "
            f"{', '.join(map(repr, names))}"
        )
    _check_smallest(kinds.smallest)


def _check_smallest(smallest: object) -> None:
    if not isinstance(smallest, int) or isinstance(smallest, bool) or smallest < 0:
        raise ValueError(f"min_8bit_size must be a number of elements, not {smallest!r}")


def options_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of states that a group has."""
    return {name: group[name] for name in GROUP_OPTIONS if group.get(name) is not None}


def kinds_in(optimizer: Kinded, group: Mapping[str, Any]) -> StateKinds:
    """How the states of a group are kept."""
    if GROUP_OPTIONS.isdisjoint(group) or optimizer._made_from is not None:
        return optimizer._kinds  # in a class that stands for torch's such a key is the script's
    options = options_in(group)
    return kinds_by(type(optimizer), optimizer._kinds, **options)


def all_kinds(optimizer: Kinded) -> list[StateKinds]:
    """Those of the groups, and that of groups without options."""
    return [optimizer._kinds, *(kinds_in(optimizer, group) for group in optimizer.param_groups)]


def warn_of_decay(optimizer: Kinded, group: Mapping[str, Any]) -> None:
    """Warn of bf16 and int8 states with a decay that rounding to the nearest undoes."""
    kinds, betas = kinds_in(optimizer, group), group.get("betas", ())
    words = None if kinds.is_noisy else _WORDS.get(kinds.of("exp_avg_sq"))
    if words and len(betas) == 2 and 0 < 1 - betas[1] < 2**-8:
        kind, last = type(optimizer).__name__, float(betas[1])
        warnings.warn(
            f"{kind}: with betas[1] = {last} and state_dtype={words[0]} the second state shrinks "
            f"by less per step than half the distance of two {words[1]}, and so not at all: "
            f"betas[1] of at most {words[2]}",
            stacklevel=5,
        )
