"""The types of states, and fp32 masters of bf16 and fp16 parameters.

The rule updates a master, which is a state of the parameter, and the parameter receives it rounded
to the nearest. The other states are fp32 too, unless there is a `state_dtype`. Where a parameter is
not its master rounded, because a script has written it, the step begins with the parameter.

A remainder takes the place of the master of a bf16 parameter: the two together are the fp32 value,
without loss (csrc/base/portable.h). State dicts have the masters.

An optimizer keeps them if it is made or sharded with `master_weights`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .._torch.dtensor import is_dtensor, like_dtensor, local_of, part_of
from ..grads.params import described, params_of
from .codes import SCALES, decoded, encoded, fit_codes, new_scales
from .param_shards import Shard, Shards, has_codes, shards_of
from .request import Rule, Steppable
from .state_kinds import StateKinds, kinds_in, warn_of_decay
from .zeros import SMALL

MASTER = "master_weights"
_NARROW = (torch.bfloat16, torch.float16)
_REMAINDERS = "remainder16"


def keeps_masters(master_weights: object) -> bool:
    """True if the option of that name asks for masters.

    Raises:
        ValueError: it names no kind of them.
    """
    kinds = (False, True, "fp32", _REMAINDERS)
    if isinstance(master_weights, (bool, str)) and master_weights in kinds:
        return bool(master_weights)
    raise ValueError(
        f'master_weights must be True, False, "fp32" or "{_REMAINDERS}", not {master_weights!r}'
    )


def has_remainders(master_weights: object) -> bool:
    """True if they are kept as remainders."""
    return master_weights == _REMAINDERS


def _refuse_fp16(optimizer: Steppable) -> None:
    """Raise ValueError for an fp16 parameter, of the group that came last, beside them."""
    number, group = len(optimizer.param_groups) - 1, optimizer.param_groups[-1]
    dtypes = [param.dtype for param in group["params"]] if optimizer._has_remainders else []
    if torch.float16 in dtypes:
        where = described(optimizer, number, dtypes.index(torch.float16))
        raise ValueError(
            f'{type(optimizer).__name__}: {where} is float16, and master_weights="{_REMAINDERS}" '
            'is for bfloat16: use "fp32"'
        )


def ending_of(
    optimizer: Steppable,
    group: dict[str, Any],
    keys: tuple[str, ...],
    found: list[Shards | None],
) -> tuple[tuple[str, ...], bool, bool, int | None, int, Shards | None]:
    """All names of states, and the end of a rule: how masters are kept and states rounded.

    Args:
        found: what a group before has found with `shards_of`, which looks at all parameters.

    Raises:
        RuntimeError: this rank has parts of parameters, of which noise does not know the places.
    """
    kinds = kinds_in(optimizer, group)
    codes_from, seed = kinds.codes_from if keys else 0, kinds.noise_seed
    if seed is not None and optimizer._is_divided_by_fsdp1():
        raise RuntimeError(
            f'{type(optimizer).__name__}: rounding="stochastic" is for whole parameters, and this '
            "rank has parts of them (FullyShardedDataParallel); nothing was updated"
        )
    shards = None
    if codes_from or seed is not None:
        found[:] = found or [shards_of(optimizer)]
        [shards] = found
    keys = _with_others(keys, bool(codes_from), optimizer._keeps_masters)
    masters = optimizer._keeps_masters, optimizer._has_remainders
    return keys, *masters, seed, codes_from, shards


def check_new_group(optimizer: Steppable) -> None:
    """Raise ValueError for the group that came last, which is dropped, or warn of it, because of
    its states."""
    group, kind = optimizer.param_groups[-1], type(optimizer).__name__
    try:
        _refuse_fp16(optimizer)
        if kinds_in(optimizer, group).is_noisy and not optimizer._formula_of(group).has_step:
            raise ValueError(
                f'{kind}: rounding="stochastic" needs a count of the steps, and {kind} keeps none'
            )
    except ValueError:
        optimizer.param_groups.pop()
        raise
    warn_of_decay(optimizer, group)


def has_master(param: Tensor) -> bool:
    """True if a parameter has one where an optimizer keeps them."""
    return param.dtype in _NARROW


def new_dtype(
    optimizer: Steppable, group: dict[str, Any], rule: Rule, param: Tensor, key: str
) -> torch.dtype:
    """The type of a new state of a parameter."""
    coded = has_codes(rule.codes_from, rule.shards, param)
    return own_dtype(optimizer, kinds_in(optimizer, group), coded, param, key)


def own_dtype(
    optimizer: Steppable, kinds: StateKinds, coded: bool, param: Tensor, key: str = ""
) -> torch.dtype:
    """The type of a state that is made or fitted here."""
    if not param.is_floating_point():  # torch's class makes its step
        return param.dtype
    wanted = kinds.of(key)
    if wanted is torch.int8:
        return optimizer._code_dtypes.get(key, torch.float32) if coded else torch.float32
    has_own = optimizer._keeps_masters and has_master(param)
    return wanted or (torch.float32 if has_own else param.dtype)


@functools.cache
def _with_others(keys: tuple[str, ...], has_scales: bool, has_master: bool) -> tuple[str, ...]:
    """The same tuple each time, by which C recognizes a step."""
    return (*keys, *[SCALES] * has_scales, *[MASTER] * has_master)


def own_keys(rule: Rule, param: Tensor) -> tuple[str, ...]:
    """The names of a parameter's states, without that of a master."""
    keys = rule.state_keys[:-1] if rule.has_master else rule.state_keys
    coded = not rule.codes_from or has_codes(rule.codes_from, rule.shards, param)
    return keys if coded else keys[:-1]


def keys_for(rule: Rule, param: Tensor) -> tuple[str, ...]:
    """The names of the states of a parameter."""
    keys = own_keys(rule, param)
    return (*keys, MASTER) if rule.has_master and has_master(param) else keys


def begin_state(optimizer: Steppable, group: dict[str, Any], rule: Rule, param: Tensor) -> None:
    """Create the missing entries of `optimizer.state[param]`, with scales and a master if it has
    them."""
    names = [key for key in own_keys(rule, param) if key in optimizer._code_dtypes]
    state = optimizer.state.get(param, {})
    scales = None
    shard = (rule.shards or {}).get(id(param))
    is_coded = has_codes(rule.codes_from, rule.shards, param)
    if is_coded and any(state.get(key) is None for key in names):
        scales = new_scales(len(names), param, shard)  # first: memory may run out
    _begin_own(optimizer, group, rule, param)
    if scales is not None:
        put_scales(optimizer.state[param], scales)


def put_scales(state: dict[str, Any], scales: Tensor) -> None:
    """Let a state have scales, before its master as in the rule's names."""
    master = state.pop(MASTER, None)
    state[SCALES] = scales
    if master is not None:
        state[MASTER] = master


def _begin_own(optimizer: Steppable, group: dict[str, Any], rule: Rule, param: Tensor) -> None:
    """The same but for the scales."""
    if not rule.has_master or not has_master(param):
        optimizer._new_state(group, rule, param)
        return
    state = optimizer.state[param]
    master = state.get(MASTER)
    if master is None and optimizer._has_remainders:
        master = optimizer._zeros.like(param, torch.int16)
    elif master is None:
        master = param.detach().to(torch.float32, copy=True)
        if master.nbytes <= SMALL:
            master = optimizer._zeros.like(master).copy_(master)
    made = {}
    if any(state.get(key) is None for key in own_keys(rule, param)):
        wide = master  # only its kind counts
        if optimizer._has_remainders:
            wide = torch.empty_like(param, dtype=torch.float32)
        shards = rule.shards or {}
        if id(param) in shards:
            shards[id(wide)] = shards[id(param)]
        try:  # those of an fp32 parameter
            optimizer._new_state(group, rule, wide)
            made = optimizer.state[wide]
        finally:
            optimizer.state.pop(wide, None)
            shards.pop(id(wide), None)
        made = {key: value for key, value in made.items() if state.get(key) is None}
    elif rule.has_step:
        optimizer._new_state(group, rule, param)  # moves a counter to the parameter's device
    state.pop(MASTER, None)
    state.update(made)
    state[MASTER] = master  # last, as in the rule's names


def complete_states(optimizer: Steppable) -> None:
    """Give states their masters that have none yet, and parameters that need no state an empty one.

    torch.distributed.checkpoint loads either no states at all or one of each parameter, and of
    each what was there before.
    """
    if not optimizer._keeps_masters or not any(map(has_master, params_of(optimizer))):
        return
    if not optimizer.state:
        return
    for group, rule in zip(optimizer.param_groups, optimizer._rules(), strict=True):
        for param in group["params"]:
            state, keys = optimizer.state.get(param), keys_for(rule, param)
            if not keys:
                optimizer.state[param]
            elif state and [key for key in keys if key not in state] == [MASTER]:
                begin_state(optimizer, group, rule, param)


class StateFormats:
    """How an optimizer keeps the states of each parameter, by what its groups and options are now.

    Made once for all parameters, because it looks at all of them.

    Args:
        groups: those of the parameters. Default: the optimizer's.
    """

    def __init__(
        self, optimizer: Steppable, groups: Sequence[dict[str, Any]] | None = None
    ) -> None:
        self._optimizer = optimizer
        self.shards = shards_of(optimizer)
        groups = optimizer.param_groups if groups is None else groups
        self._kinds = {id(p): kinds for kinds, p in _params_by_kinds(optimizer, groups)}

    def shard_of(self, param: Tensor) -> Shard | None:
        """What the optimizer has of a parameter; None for all of it."""
        return (self.shards or {}).get(id(param))

    def dtype_of(self, key: str, param: Tensor) -> torch.dtype | None:
        """The type of an entry of a state whatever is loaded; None for that which torch gives."""
        optimizer = self._optimizer
        masters = optimizer._keeps_masters and has_master(param)
        if key == "step":
            return None
        if key == MASTER or key in optimizer._numbers:
            halves = key == MASTER and optimizer._has_remainders
            return (torch.int16 if halves else torch.float32) if masters else None
        if key == SCALES:
            return torch.bfloat16
        kinds, coded = self._kinds_of(param)
        has_own = masters or kinds.of(key) is not None
        return own_dtype(optimizer, kinds, coded, param, key) if has_own else None

    def code_dtypes_of(self, param: Tensor) -> dict[str, torch.dtype | None]:
        """The types of codes of a parameter's states; None for one that is not in codes."""
        kinds, coded = self._kinds_of(param)
        return {
            key: dtype if coded and kinds.of(key) is torch.int8 else None
            for key, dtype in self._optimizer._code_dtypes.items()
        }

    def is_asked(self, key: str, param: Tensor) -> bool:
        """True if an option says of which type an entry is."""
        return self._kinds_of(param)[0].of(key) is not None

    def fitting(
        self, state: Mapping[str, Any], param: Tensor, staying: Collection[str] = ()
    ) -> dict[str, Any]:
        """A state as a step needs it: of its types but for some names, without a master where none
        is kept."""
        fit, was_coded, shard = {}, SCALES in state, self.shard_of(param)
        dtypes = self.code_dtypes_of(param)
        if was_coded and not fit_codes(state, dtypes, param):
            state = decoded(state, shard)
        for key, value in state.items():
            dtype = self.dtype_of(key, param)
            if key == MASTER and dtype is None:
                continue
            if key in staying:
                fit[key] = value
                continue
            if was_coded and dtype is None and key != "step":
                dtype = param.dtype  # as torch does where there are no codes
            is_cast = dtype is not None and isinstance(value, Tensor) and value.is_floating_point()
            if is_cast and dtype is torch.int16:
                fit[key] = _remainder(value, param)
            elif key == MASTER and dtype is torch.float32 and is_remainder(value):
                fit[key] = joined(param, value)
            else:
                is_cast = is_cast and dtype is not None and dtype.is_floating_point
                fit[key] = value.to(dtype) if is_cast else value
        if any(dtypes.values()):
            fit = encoded(fit, dtypes, param, shard)
            if SCALES in fit:
                put_scales(fit, fit.pop(SCALES))
        return fit

    def _kinds_of(self, param: Tensor) -> tuple[StateKinds, bool]:
        kinds = self._kinds.get(id(param), self._optimizer._kinds)
        return kinds, has_codes(kinds.codes_from, self.shards, param)


def give_masters(optimizer: Steppable, state_dict: dict[str, Any], native: bool) -> None:
    """Put masters into a state dict in place of their remainders, unless it is `native`; but leave
    those out whose parameters were cast meanwhile."""
    if not optimizer._has_remainders:
        return
    indices = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
    for index, param in zip(indices, params_of(optimizer)):  # noqa: B905 - a hook may change it
        state = state_dict["state"].get(index, {})
        remainder, is_cast = state.get(MASTER), param.dtype is not torch.bfloat16
        if is_remainder(remainder) and (is_cast or not native):
            made = {} if is_cast else {MASTER: joined(param, remainder)}
            state_dict["state"][index] = {k: v for k, v in state.items() if k != MASTER} | made


def is_remainder(value: object) -> TypeGuard[Tensor]:
    """True for the other half of a master."""
    return isinstance(value, Tensor) and value.dtype is torch.int16


def is_bf16(state: object) -> TypeGuard[Tensor]:
    """True for a state in bfloat16, and none of a single number."""
    return isinstance(state, Tensor) and state.dtype is torch.bfloat16 and state.dim() > 0


def joined(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 value, as in csrc/base/portable.h."""
    if is_dtensor(param):
        return like_dtensor(param, joined(local_of(param), part_of(remainder)))
    upper = param.detach().resolve_neg()
    bits = (upper.view(torch.int16).to(torch.int32) << 16) + remainder
    both = bits.view(torch.float32)
    return torch.where(both.isnan(), upper.float(), both)


def _remainder(master: Tensor, param: Tensor) -> Tensor:
    """The remainder of a master beside its parameter.

    fp32 masters round a tie to even. Where that was down, the remainder of the tie would be one of
    the number below: the largest remainder is taken, one fp32 number less than the tie.
    """
    if is_dtensor(master):
        return like_dtensor(master, _remainder(local_of(master), part_of(param)))
    master = master.float().resolve_neg()
    bits = master.view(torch.int32)
    low = torch.where(master.isnan(), 0, bits << 16 >> 16)
    if param.shape == master.shape and param.dtype is torch.bfloat16:
        upper = param.detach().resolve_neg().view(torch.int16)
        low = torch.where((low == -(2**15)) & (bits >> 16 == upper), 2**15 - 1, low)
    return low.to(torch.int16)


def _params_by_kinds(
    optimizer: Steppable, groups: Sequence[dict[str, Any]]
) -> Iterator[tuple[StateKinds, Tensor]]:
    for group in groups:
        kinds = kinds_in(optimizer, group)
        yield from ((kinds, param) for param in group["params"])


def _has_own_types(optimizer: Steppable) -> bool:
    shards = shards_of(optimizer)
    for kinds, param in _params_by_kinds(optimizer, optimizer.param_groups):
        coded = has_codes(kinds.codes_from, shards, param)
        if coded or kinds.by_name or own_dtype(optimizer, kinds, coded, param) != param.dtype:
            return True
    return False


def refuse_by_torch(optimizer: Steppable, reason: str) -> None:
    """Raise RuntimeError for a step by torch's operators, which know no masters nor other types."""
    kept = ""
    if optimizer._keeps_masters and any(map(has_master, params_of(optimizer))):
        kept = "masters (master_weights), which torch's operators do not know"
    elif _has_own_types(optimizer):
        kept = "states of a type of their own (state_dtype), which torch's operators do not take"
    if kept:
        reason = reason.removesuffix("; nothing was updated")
        raise RuntimeError(
            f"{type(optimizer).__name__} keeps {kept}, and this step needs them: {reason}; "
            "nothing was updated"
        )
