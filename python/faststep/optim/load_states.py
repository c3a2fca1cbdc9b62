"""Loading and saving states of another type than their parameter, which torch would give them."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ..grads.params import params_of
from .codes import SCALES, decoded
from .foreign_states import translated
from .masters import StateFormats, give_masters
from .request import Steppable
from .state_kinds import GROUP_OPTIONS, all_kinds, kinds_in, options_in


class _Boxed(Tensor):
    """A box around a state, which torch then leaves as it is."""

    value: Tensor

    def to(self, *_: Any, **__: Any) -> Tensor:
        """Itself."""
        return self


def _boxed(value: Tensor) -> _Boxed:
    boxed = _Boxed()  # an empty tensor: some classes of torch replace states that are no tensors
    boxed.value = value
    return boxed


class _Loading(NamedTuple):
    kinds: Steppable  # which masters and types it has
    options: list[dict[str, Any]]  # of the groups
    fits: bool  # the states are given these types, not only kept as they are

    def wrap(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Before torch's load_state_dict(), and after the hooks of the script."""
        state_dict = translated(self.kinds, optimizer.param_groups, state_dict)
        of_groups = [kinds_in(self.kinds, group) for group in optimizer.param_groups]
        plain = not self.kinds._keeps_masters and all(kinds.is_torchs for kinds in of_groups)
        if plain and not _has_codes(state_dict):
            return state_dict  # torch gives all types
        saved = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        params = dict(zip(saved, params_of(optimizer)))  # noqa: B905 - torch says what does not fit
        formats = StateFormats(self.kinds, optimizer.param_groups)
        states = {
            key: {
                name: _wrapped(name, value, params[key], state, formats)
                for name, value in state.items()
            }
            if key in params
            else state
            for key, state in state_dict["state"].items()
        }
        return {**state_dict, "state": states}

    def unwrap(self, optimizer: Optimizer) -> None:
        """After it, and before the hooks of the script."""
        for group, own in zip(optimizer.param_groups, self.options, strict=True):
            _drop_options(group)  # those of a checkpoint are not this optimizer's
            group.update(own)
        states = {
            param: _unwrapped(state, param) if isinstance(param, Tensor) else state
            for param, state in optimizer.state.items()
        }
        if self.fits:
            formats = StateFormats(self.kinds)
            for param, state in states.items():
                if isinstance(param, Tensor):
                    states[param] = formats.fitting(state, param)
        optimizer.state = defaultdict(dict, states)


def _wrapped(
    name: str, value: Any, param: Tensor, state: dict[str, Any], formats: StateFormats
) -> Any:
    """In a box, unless torch is to give it the type of the parameter."""
    if not isinstance(value, Tensor) or not isinstance(param, Tensor):
        return value
    is_kept = formats.dtype_of(name, param) is not None
    return _boxed(value) if is_kept or (SCALES in state and name != "step") else value


def _has_codes(state_dict: dict[str, Any]) -> bool:
    states = state_dict.get("state", {}).values()
    return any(SCALES in state for state in states if isinstance(state, dict))


@contextlib.contextmanager
def loading_states(optimizer: Optimizer, kinds: Steppable, fits: bool = True) -> Iterator[None]:
    """Inside, torch's load_state_dict() loads masters, and states of the types that `kinds` has.

    Unless it `fits` them, those that torch would change stay as they were saved.
    """
    loading = _Loading(kinds, [options_in(group) for group in optimizer.param_groups], fits)
    handles = [
        optimizer.register_load_state_dict_pre_hook(loading.wrap),
        optimizer.register_load_state_dict_post_hook(loading.unwrap, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _unwrapped(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    return {
        name: _on_device(value.value, param) if isinstance(value, _Boxed) else value
        for name, value in state.items()
    }


def _on_device(value: Tensor, param: Tensor) -> Tensor:
    return value if value.device == param.device else value.to(param.device)


def show_as_torch(optimizer: Steppable, state_dict: dict[str, Any], native: bool) -> None:
    """Give a state dict what torch's would have in place of codes, remainders and counters.

    Args:
        native: leave codes and remainders as they are.
    """
    states = state_dict["state"]
    show_plain(optimizer, state_dict, native)
    for group in state_dict["param_groups"]:
        if group.get("fused") or group.get("capturable") or optimizer._counts_on_device:
            continue
        for index in group["params"]:
            state = states.get(index, {})
            counts = {key: state.get(key) for key in ("step", *optimizer._numbers)}
            if any(isinstance(count, Tensor) and count.is_cuda for count in counts.values()):
                moved = {key: n.cpu() for key, n in counts.items() if isinstance(n, Tensor)}
                states[index] = {**state, **moved}


def hide_options(optimizer: Steppable, state_dict: dict[str, Any]) -> None:
    """Leave the options of groups that torch does not know out of a state dict."""
    for group in state_dict["param_groups"] if optimizer._made_from is None else ():
        _drop_options(group)


def _drop_options(group: dict[str, Any]) -> None:
    for name in GROUP_OPTIONS:
        group.pop(name, None)


def show_plain(optimizer: Steppable, state_dict: dict[str, Any], native: bool) -> None:
    """The same, but for counters."""
    hide_options(optimizer, state_dict)
    if not native and any(kinds.codes_from for kinds in all_kinds(optimizer)):
        states = state_dict["state"]
        indices = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        formats = StateFormats(optimizer)
        for index, param in zip(indices, params_of(optimizer)):  # noqa: B905 - as give_masters
            if index in states:
                states[index] = decoded(states[index], formats.shard_of(param))
    if not native:
        give_masters(optimizer, state_dict)
