"""Loading and saving states of another type than their parameter, which torch would give them."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..grads.params import params_of
from .codes import SCALES, are_codes, check_codes, decoded
from .foreign_states import translated
from .masters import MASTER, StateFormats, give_masters, is_bf16, is_remainder
from .param_shards import Shard
from .request import Steppable
from .state_kinds import GROUP_OPTIONS, kinds_in, options_in


class _Boxed(Tensor):
    """A box around a state, which torch then leaves as it is."""

    value: Tensor
    stays: bool  # and whoever else

    def to(self, *_: Any, **__: Any) -> Tensor:
        """Itself."""
        return self


class _Loading(NamedTuple):
    kinds: Steppable  # which masters and types it has
    options: list[dict[str, Any]]  # of the groups
    fits: bool  # the states are given these types, not only kept as they are
    own: Mapping[Tensor, dict[str, Any]]  # the states that are there

    def wrap(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Before torch's load_state_dict(), and after the hooks of the script."""
        state_dict = translated(self.kinds, optimizer.param_groups, state_dict)
        of_groups = [kinds_in(self.kinds, group) for group in optimizer.param_groups]
        plain = not self.kinds._keeps_masters and all(kinds.is_torchs for kinds in of_groups)
        if plain and not _has_narrow(state_dict):
            return state_dict  # torch gives all types
        saved = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        params = dict(zip(saved, params_of(optimizer)))  # noqa: B905 - torch says what does not fit
        formats = StateFormats(self.kinds, optimizer.param_groups)
        states = dict(state_dict["state"])
        widened: list[str] = []
        for key, state in states.items():
            param = params.get(key)
            if isinstance(param, Tensor):
                self._check(key, state, formats.shard_of(param), param)
                states[key] = {
                    name: self._wrapped(name, value, param, state, formats, widened)
                    for name, value in state.items()
                }
        if widened and self.kinds._made_from is None:
            warnings.warn(
                f"{type(self.kinds).__name__}: load_state_dict() gives states in bfloat16 their "
                f'parameter\'s type, as torch does: state_dtype="bf16" keeps {widened[0]}',
                stacklevel=6,
            )
        return {**state_dict, "state": states}

    def _check(
        self, key: object, state: Mapping[str, Any], shard: Shard | None, param: Tensor
    ) -> None:
        """Raise ValueError, which names the parameter, for a damaged state in codes or halves."""
        master = state.get(MASTER)
        try:
            check_codes(state, self.kinds._code_dtypes, shard)
            if is_remainder(master) and master.shape != param.shape:
                shape, wanted = tuple(master.shape), tuple(param.shape)
                raise ValueError(f"{MASTER!r} has the shape {shape}, and the parameter {wanted}")
            if is_remainder(master) and param.dtype != torch.bfloat16 and self.kinds._keeps_masters:
                raise ValueError(
                    f"{MASTER!r} is the other half of a bfloat16 parameter, not {param.dtype}: "
                    "save state_dict() without native=True"
                )
        except ValueError as error:
            text = f"load_state_dict(): the state of parameter {key!r}: {error}"
            raise ValueError(text) from None

    def _wrapped(
        self,
        name: str,
        value: Any,
        param: Tensor,
        state: dict[str, Any],
        formats: StateFormats,
        widened: list[str],
    ) -> Any:
        """In a box, unless torch is to give it the type of the parameter.

        A state in bfloat16 that is to be of another type, without an option that says so, stays
        where the optimizer has it in bfloat16. Its name goes to `widened` if it does not.
        """
        if not isinstance(value, Tensor):
            return value
        stays = False
        if is_bf16(value) and name not in (SCALES, MASTER) and not formats.is_asked(name, param):
            stays = is_bf16(self.own.get(param, {}).get(name))
            if not stays and param.dtype is not torch.bfloat16:
                widened.append(repr(name))
        is_kept = stays or formats.dtype_of(name, param) is not None
        if not is_kept and (SCALES not in state or name == "step"):
            return value
        boxed = _Boxed()  # no object: some classes of torch replace states that are no tensors
        boxed.value, boxed.stays = value, stays
        return boxed

    def unwrap(self, optimizer: Optimizer) -> None:
        """After it, and before the hooks of the script."""
        for group, own in zip(optimizer.param_groups, self.options, strict=True):
            _drop_options(group)  # those of a checkpoint are not this optimizer's
            group.update(own)
        formats = StateFormats(self.kinds) if self.fits else None
        states = {
            param: _unwrapped(state, param, formats) if isinstance(param, Tensor) else state
            for param, state in optimizer.state.items()
        }
        optimizer.state = defaultdict(dict, states)


def _has_narrow(state_dict: dict[str, Any]) -> bool:
    """True if there are codes, scales or states in bfloat16."""
    return any(
        key == SCALES or are_codes(value) or getattr(value, "dtype", None) is torch.bfloat16
        for state in _states_of(state_dict).values()
        for key, value in state.items()
    )


@contextlib.contextmanager
def loading_states(
    optimizer: Optimizer,
    kinds: Steppable,
    fits: bool = True,
    own: Mapping[Tensor, dict[str, Any]] | None = None,
) -> Iterator[None]:
    """Inside, torch's load_state_dict() loads masters, and states of the types that `kinds` has.

    Unless it `fits` them, those that torch would change stay as they were saved. `own` are the
    states that are there. An error leaves them there.
    """
    groups, states = optimizer.param_groups, optimizer.state
    options = [options_in(group) for group in groups]
    loading = _Loading(kinds, options, fits, states if own is None else own)
    handles = [
        optimizer.register_load_state_dict_pre_hook(loading.wrap),
        optimizer.register_load_state_dict_post_hook(loading.unwrap, prepend=True),
    ]
    try:
        yield
    except BaseException:
        optimizer.param_groups, optimizer.state = groups, states
        raise
    finally:
        for handle in handles:
            handle.remove()


def _unwrapped(
    state: dict[str, Any], param: Tensor, formats: StateFormats | None
) -> dict[str, Any]:
    boxed = {name: value for name, value in state.items() if isinstance(value, _Boxed)}
    made = {**state, **{name: _on_device(one.value, param) for name, one in boxed.items()}}
    staying = [name for name, value in boxed.items() if value.stays]
    return made if formats is None else formats.fitting(made, param, staying)


def _on_device(value: Tensor, param: Tensor) -> Tensor:
    return value if value.device == param.device else value.to(param.device)


def before_hooks(
    optimizer: Optimizer,
    made: Callable[[], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """A state dict that torch has `made`, and `show` has changed before hooks of the script."""
    if not optimizer._optimizer_state_dict_post_hooks:  # two threads may save at the same time
        show(state_dict := made())
        return state_dict
    handle = optimizer.register_state_dict_post_hook(lambda _, own: show(own), prepend=True)
    try:
        return made()
    finally:
        handle.remove()


def show_as_torch(optimizer: Steppable, state_dict: dict[str, Any], native: bool) -> None:
    """Give a state dict what torch's would have in place of codes, remainders and counters.

    Args:
        native: leave codes and remainders as they are.
    """
    states = _states_of(state_dict)
    show_plain(optimizer, state_dict, native)
    for group in state_dict["param_groups"]:
        if group.get("fused") or group.get("capturable") or optimizer._counts_on_device:
            continue
        for index in group["params"]:
            state = states.get(index, {})
            counts = {key: state.get(key) for key in ("step", *optimizer._numbers)}
            if any(isinstance(count, Tensor) and count.is_cuda for count in counts.values()):
                moved = {key: n.cpu() for key, n in counts.items() if isinstance(n, Tensor)}
                state_dict["state"][index] = {**state_dict["state"][index], **moved}


def _states_of(state_dict: dict[str, Any]) -> dict[Any, Mapping[str, Any]]:
    """Those of parameters; a script may have put values of its own beside them."""
    entries = state_dict.get("state", {}).items()
    return {key: state for key, state in entries if isinstance(state, Mapping)}


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
    states = _states_of(state_dict)
    if not native and any(SCALES in state for state in states.values()):
        indices = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        formats = StateFormats(optimizer)
        for index, param in zip(indices, params_of(optimizer)):  # noqa: B905 - as give_masters
            if SCALES in states.get(index, {}):
                state_dict["state"][index] = decoded(states[index], formats.shard_of(param))
    give_masters(optimizer, state_dict, native)
