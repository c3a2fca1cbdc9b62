"""Checks the types of all values in a loaded state before any of them is used."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from ..types import State

Test = Callable[[Any], bool]


def _int_from(low: int, end: int) -> Test:
    return lambda value: type(value) is int and low <= value < end


_is_int = _int_from(-(1 << 63), 1 << 63)
_is_count = _int_from(0, 1 << 63)
_is_seed = _int_from(-(1 << 63), 1 << 64)


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _or_none(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _all(test: Test) -> Test:
    return lambda value: isinstance(value, (list, tuple)) and all(map(test, value))


def _is_words(value: object) -> bool:
    """The state of a generator on any device; on the CPU it is tried."""
    if not (isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1):
        return False
    if len(value) == len(torch.default_generator.get_state()):
        try:
            torch.Generator().set_state(value)
        except RuntimeError:
            return False
    return value.device.type == "cpu"


def _is_own_words(value: Any) -> bool:
    return _is_words(value) and len(value) == len(torch.default_generator.get_state())


def _is_python(value: Any) -> bool:
    try:
        random.Random().setstate((value[0], tuple(value[1].tolist()), *value[2:]))
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RuntimeError):
        return False
    return True


def _is_numpy(value: Any) -> bool:
    try:
        name, words, place, has_gauss, gauss = value
        is_number = isinstance(gauss, float) and has_gauss in (0, 1)
        is_place = name == "MT19937" and 0 <= place <= 624
        return is_number and is_place and words.dtype == torch.int64 and len(words) == 624
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False


OF_DRAWS: dict[str, Test] = {
    "torch": _is_own_words,
    "own": _is_words,
    "python": _is_python,
    "numpy": _is_numpy,
}


def _is_draws(value: object) -> bool:
    return isinstance(value, dict) and all(
        when in ("iter", "first")
        and isinstance(noted, dict)
        and all(name in OF_DRAWS and OF_DRAWS[name](state) for name, state in noted.items())
        for when, noted in value.items()
    )


def _is_states(value: object) -> bool:
    keys = {"object", "iterator", "ended"}
    return isinstance(value, dict) and set(value) == keys and _or_none(_is_flag)(value["ended"])


def _is_span(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_count, value))


COUNT = "an int from 0 on"
Field = tuple[Test, str]
LOADER: dict[str, Field] = {
    "_num_yielded": (_is_count, COUNT),
    "_sampler_iter_yielded": (_is_count, COUNT),
    "_sampler_iter_state": (_or_none(lambda value: isinstance(value, dict)), "a dict or None"),
    "_base_seed": (_or_none(_is_count), "an int of 64 bits from 0 on or None"),
    "_iterator_finished": (_is_flag, "a bool"),
    "_dataset_epoch": (_is_int, "an int"),
    "_transforms_epoch": (_is_count, COUNT),
    "_beyond": (_all(_is_count), "a list of ints from 0 on"),
    "_batch_size": (_is_count, COUNT),
    "_num_workers": (_is_count, COUNT),
    "_last_worker": (_int_from(-1, 1 << 63), "an int from -1 on"),
    "_workers": (_all(lambda value: isinstance(value, dict)), "a list of dicts"),
}
SAMPLER: dict[str, Field] = {
    "sampler": (lambda value: isinstance(value, str), "a str"),
    "length": (_or_none(_is_count), f"{COUNT} or None"),
    "num_samples": (_is_count, COUNT),
    "samples_yielded": (_is_count, COUNT),
    "items_yielded": (_is_count, COUNT),
    "since": (_is_count, COUNT),
    "position": (_is_count, COUNT),
    "epoch": (_is_int, "an int"),
    "seed": (_is_seed, "an int of 64 bits"),
    "shuffle": (_is_flag, "a bool"),
    "drop_last": (_is_flag, "a bool"),
    "generator": (_is_words, "a generator's state"),
    "global": (_is_words, "a generator's state"),
    "draws": (_is_draws, "random states"),
    "states": (_or_none(_is_states), "the states of a sampler"),
}
WORKER: dict[str, Field] = {
    "states": (_or_none(_is_states), "the states of a dataset"),
    "samples": (_is_count, COUNT),
    "new_epoch": (_is_flag, "a bool"),
    "draws": (_or_none(_is_draws), "random states"),
    "left": (_is_flag, "a bool"),
    "failed": (_all(_is_span), "a list of pairs of ints from 0 on"),
}


def check_form(state: State) -> None:
    """
    Raises:
        ValueError: something in the state is of another type than any loader has put there.
    """
    _check(state, LOADER, "state")
    _check(state["_sampler_iter_state"] or {}, SAMPLER, "state['_sampler_iter_state']")
    for number, saved in enumerate(state.get("_workers", ())):
        _check(saved, WORKER, f"state['_workers'][{number}]")
    # a state has none of its workers, or all
    expected = max(1, state.get("_num_workers", 0))
    if "_workers" in state and len(state["_workers"]) != expected:
        raise ValueError(
            f"not a state of this DataLoader: it has {len(state['_workers'])} records of "
            f"{expected} workers"
        )


def _check(part: State, fields: dict[str, Field], name: str) -> None:
    for key, (fits, expected) in fields.items():
        if key in part and not fits(part[key]):
            shown = repr(part[key])
            shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
            raise ValueError(
                f"not a state of this DataLoader: {name}[{key!r}] is {shown}, expected {expected}"
            )
