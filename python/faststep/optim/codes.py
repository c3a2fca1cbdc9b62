"""States in 8 bits: a code per element, and a bf16 scale per block of them.

csrc/rules/codes.h has the format, which the step reads and writes. This is the same format in
torch's operators, for state dicts. A tensor may be a shard of a whole, whose blocks it has then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._torch.dtensor import is_dtensor, like_dtensor, part_of, spec_of
from .param_shards import BLOCK, CHUNK, Shard, row_of

SCALES = "state_scales"  # of a parameter's states in codes, a row each

_NO_ROWS = ("step", SCALES, "master_weights")
_MOST, _LEAST = 2.0**126, 2.0**-126  # a block with a larger number becomes NaN
_SLACK = 16


def are_codes(value: object) -> bool:
    """True for a state in codes, which no step counter is."""
    return (
        isinstance(value, Tensor) and value.dtype in (torch.int8, torch.uint8) and value.dim() > 0
    )


def new_scales(states: int, param: Tensor, shard: Shard | None) -> Tensor:
    """Those of states of zeros."""
    like = torch.empty_like(part_of(param), device="meta")  # without gaps
    return torch.zeros(states, _count(like, shard), dtype=torch.bfloat16, device=param.device)


def decoded(state: Mapping[str, Any], shard: Shard | None = None) -> dict[str, Any]:
    """A state with its codes as float32, and without scales.

    Raises:
        ValueError: the scales are not those of the codes.
    """
    check_scales(state, shard)
    return {key: shown(state, key, shard) for key in state if key != SCALES}


def check_codes(
    state: Mapping[str, Any], dtypes: Mapping[str, torch.dtype], shard: Shard | None
) -> None:
    """Raise ValueError for codes without scales, of other types than `dtypes`, or with scales that
    no step has written."""
    scales = state.get(SCALES)
    for key, value in state.items():
        if key in dtypes and are_codes(value):
            if value.dtype is not dtypes[key]:
                raise ValueError(f"'{key}' has codes of {value.dtype}, and not of {dtypes[key]}")
            if scales is None:
                raise ValueError(f"'{SCALES}' are missing beside '{key}'")
    if scales is None:
        return
    is_float = isinstance(scales, Tensor) and scales.is_floating_point()
    if not is_float or bool(((scales < 0) | scales.isinf()).any()):
        raise ValueError(f"'{SCALES}' are no scales: these are numbers from 0 on, or NaN")
    check_scales(state, shard)


def check_scales(state: Mapping[str, Any], shard: Shard | None = None) -> None:
    """Raise ValueError if the scales of a state are not those of its codes."""
    scales = state.get(SCALES)
    if scales is None:
        return
    for row, key in enumerate(_rows(state)):
        codes = part_of(state[key])
        wanted = scales.shape[0] if scales.dim() == 2 else 0, _count(codes, shard)
        fit = scales.shape == wanted and wanted[0] > row and _is_dense(codes)
        if are_codes(codes) and not fit:
            raise ValueError(f"'{SCALES}' are not the scales of '{key}'")


def shown(state: Mapping[str, Any], key: str, shard: Shard | None) -> Any:
    """An entry of a state whose scales fit; codes are float32."""
    value = state[key]
    if SCALES not in state or not are_codes(value):
        return value
    made = _decode(part_of(value), state[SCALES][_rows(state).index(key)], shard)
    return like_dtensor(value, made) if is_dtensor(value) else made


def _rows(state: Mapping[str, Any]) -> list[str]:
    """The names of the states that rows of the scales are for, of which some may be in codes."""
    return [
        key
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() and key not in _NO_ROWS
    ]


def encoded(
    state: Mapping[str, Any],
    dtypes: Mapping[str, torch.dtype | None],
    param: Tensor,
    shard: Shard | None,
) -> dict[str, Any]:
    """A state with the entries that `dtypes` names in codes of these types, but for None.

    Entries that are no floats of the parameter's shape stay as they are.
    """
    made: dict[str, Any] = dict(state)
    scales = []
    for key, dtype in dtypes.items():
        value = made.get(key)
        if not isinstance(value, Tensor) or are_codes(value) or value.shape != param.shape:
            continue
        if dtype is None:
            scales.append(new_scales(1, param, shard)[0])
        elif value.is_floating_point():
            like = torch.empty_like(part_of(param), dtype=torch.float32)
            codes, row = _encode(like.copy_(_divided_as(value, param)), dtype, shard)
            made[key] = like_dtensor(param, codes) if is_dtensor(param) else codes
            scales.append(row)
    is_new = scales and SCALES not in made
    return {**made, SCALES: torch.stack(scales)} if is_new else made


def _divided_as(value: Any, param: Tensor) -> Tensor:
    """The elements of a state that are beside those of a parameter on this rank."""
    if not is_dtensor(param) or not is_dtensor(value):
        return part_of(value)
    spec = spec_of(param)
    same = spec_of(value).placements == spec.placements
    return part_of(value if same else value.redistribute(spec.mesh, spec.placements))


def fit_codes(
    state: Mapping[str, Any], dtypes: Mapping[str, torch.dtype | None], param: Tensor
) -> bool:
    """True if a state's codes are those of a parameter like this one, of these types."""
    like = torch.empty_like(part_of(param), device="meta")
    found = {key: value.dtype if are_codes(value) else None for key, value in state.items()}
    if any(dtype != dtypes.get(key) for key, dtype in found.items() if dtype or key in dtypes):
        return False
    return all(
        is_dtensor(value) == is_dtensor(param)
        and (part_of(value).shape, part_of(value).stride(), value.device)
        == (like.shape, like.stride(), param.device)
        for value in state.values()
        if are_codes(value)
    )


def with_scales_of(state: Mapping[str, Any], shard: Shard | None, count: int) -> Mapping[str, Any]:
    """The state of a whole parameter, with the scales of a shard of so many elements alone.

    It has no codes if the shard has none.
    """
    if SCALES not in state:
        return state
    if shard is None or not shard.coded:
        return decoded(state)
    first = _before(shard)
    cut = state[SCALES][:, first : first + _scales_of(shard, count)]
    return {**state, SCALES: cut.clone(memory_format=torch.contiguous_format)}


def _is_dense(value: Tensor) -> bool:
    """True for a tensor without gaps."""
    return value.stride() == torch.empty_like(value, device="meta").stride()


def _room(row: int) -> int:
    """The scales that a chunk has room for."""
    return CHUNK // BLOCK + (CHUNK // row + 2 if row else 0)


def _before(shard: Shard) -> int:
    """The scales of the whole before those of a shard."""
    return shard.begin // CHUNK * _room(shard.row) if shard.row else shard.begin // BLOCK


def _scales_of(shard: Shard, count: int) -> int:
    end = shard.begin + count
    blocks = -(-end // CHUNK) * _room(shard.row) if shard.row else -(-end // BLOCK)
    return blocks - _before(shard)


def _all_of(value: Tensor) -> Shard:
    return Shard(0, 0, row_of(value), coded=True)


def _count(value: Tensor, shard: Shard | None) -> int:
    return _scales_of(shard or _all_of(value), value.numel())


def _slots(count: int, shard: Shard) -> Tensor:
    """Of each element of a shard its place in a table with a line of 64 for each scale."""
    low = shard.begin // CHUNK * CHUNK
    at = torch.arange(low, shard.begin + count)
    chunk = at // CHUNK
    begin = torch.maximum(at - at % shard.row, chunk * CHUNK)
    within = (at - begin) % BLOCK
    block = (within == 0).cumsum(0)
    block = block - block[chunk * CHUNK - low] + chunk * _room(shard.row) - _before(shard)
    return (block * BLOCK + within)[shard.begin - low :]


def _table(value: Tensor, shard: Shard) -> Tensor:
    """The elements in the order of memory, a block per line, with zeros where none are."""
    flat = value.detach().as_strided((value.numel(),), (1,), value.storage_offset())
    if not shard.row and flat.numel() % BLOCK == 0:
        return flat.view(-1, BLOCK)
    table = flat.new_zeros(_scales_of(shard, flat.numel()) * BLOCK)
    if shard.row:
        table[_slots(flat.numel(), shard).to(value.device)] = flat
    else:
        table[: flat.numel()] = flat
    return table.view(-1, BLOCK)


def _shaped(table: Tensor, like: Tensor, shard: Shard) -> Tensor:
    """The elements of a table as a tensor of that shape and these strides."""
    flat = table.reshape(-1)
    if shard.row:
        flat = flat[_slots(like.numel(), shard).to(like.device)]
    return flat[: like.numel()].as_strided(like.shape, like.stride())


def _encode(value: Tensor, dtype: torch.dtype, shard: Shard | None) -> tuple[Tensor, Tensor]:
    """The codes of a tensor without gaps, and their scales."""
    blocks = shard or _all_of(value)
    table, is_signed = _table(value, blocks), dtype is torch.int8
    terms = table if is_signed else table.sqrt()
    largest, most = terms.abs().amax(1, keepdim=True), _MOST if is_signed else _MOST**0.5
    up = (largest.view(torch.int32) + (0xFFFF - _SLACK)).bitwise_and_(-0x10000).view(torch.float32)
    scales = torch.where(largest <= most, torch.where(up < _LEAST, 0.0, up), torch.nan)
    if is_signed:
        numbers = terms / (torch.where(scales > 0, scales, torch.inf) + terms.abs()) * 254.0
    else:
        larger = (scales.view(torch.int32) + 0x10000).view(torch.float32)
        again = _of_root(_to_root(terms, larger).round(), larger)
        # Its largest code may be 253, whose number has a smaller scale than it came from.
        is_exact = (again == table).all(1, keepdim=True) & (scales > 0)
        scales = torch.where(is_exact, larger, scales)
        numbers = _to_root(terms, scales)
    codes = torch.where(scales.isnan(), 0.0, numbers).round().to(dtype)
    return _shaped(codes, value, blocks), scales.view(-1).to(torch.bfloat16)


def _decode(codes: Tensor, scales: Tensor, shard: Shard | None) -> Tensor:
    blocks = shard or _all_of(codes)
    table, scale = _table(codes, blocks).float(), scales.float().view(-1, 1)
    if codes.dtype is torch.int8:
        numbers = scale * (table / (254.0 - table.abs()))
    else:
        numbers = _of_root(table, scale)
    return _shaped(numbers, codes, blocks)


def _to_root(terms: Tensor, scales: Tensor) -> Tensor:
    numbers = terms * torch.where(scales > 0, torch.full_like(scales, 255.0) / scales, 0.0)
    return torch.where(terms > 0, numbers.clamp(min=1.0), numbers)


def _of_root(codes: Tensor, scales: Tensor) -> Tensor:
    return (codes * (scales * (1 / 255))).square()
