"""States in 8 bits: a code per element, and a bf16 scale per block of them.

csrc/rules/codes.h has the format, which the step reads and writes. This is the same format in
torch's operators, for state dicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SCALES = "state_scales"  # of a parameter's states in codes, a row each

_BLOCK, _CHUNK = 64, 16384
_MOST, _LEAST = 2.0**126, 2.0**-126  # a block with a larger number becomes NaN
_SLACK = 16


def are_codes(value: object) -> bool:
    """True for a state in codes, which no step counter is."""
    return (
        isinstance(value, Tensor) and value.dtype in (torch.int8, torch.uint8) and value.dim() > 0
    )


def new_scales(states: int, param: Tensor) -> Tensor:
    """Those of states of zeros."""
    like = torch.empty_like(param, device="meta")  # without gaps
    return torch.zeros(states, _count(like), dtype=torch.bfloat16, device=param.device)


def decoded(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with its codes as float32, and without scales.

    Raises:
        ValueError: the scales are not those of the codes.
    """
    plain = dict(state)
    scales = plain.pop(SCALES, None)
    if scales is None:
        return plain
    coded = [key for key, value in plain.items() if are_codes(value)]
    for row, key in enumerate(coded):
        wanted = scales.shape[0] if scales.dim() == 2 else 0, _count(plain[key])
        if scales.shape != wanted or wanted[0] < len(coded) or not _is_dense(plain[key]):
            raise ValueError(f"'{SCALES}' are not the scales of '{key}'")
        plain[key] = _decode(plain[key], scales[row])
    return plain


def encoded(
    state: Mapping[str, Any], dtypes: Mapping[str, torch.dtype], param: Tensor
) -> dict[str, Any]:
    """A state with the entries that `dtypes` names in codes of these types.

    Entries that are no floats of the parameter's shape stay as they are.
    """
    made, scales = dict(state), []
    for key, dtype in dtypes.items():
        value = made.get(key)
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == param.shape:
            like = torch.empty_like(param, dtype=torch.float32)
            made[key], row = _encode(like.copy_(value), dtype)
            scales.append(row)
    return {**made, SCALES: torch.stack(scales)} if scales else made


def fit_codes(state: Mapping[str, Any], param: Tensor) -> bool:
    """True if a state's codes and scales are those of a parameter like this one."""
    like = torch.empty_like(param, device="meta")
    return all(
        (value.shape, value.stride(), value.device) == (like.shape, like.stride(), param.device)
        for value in state.values()
        if are_codes(value)
    )


def _is_dense(value: Tensor) -> bool:
    """True for a tensor without gaps."""
    return value.stride() == torch.empty_like(value, device="meta").stride()


def _row(value: Tensor) -> int:
    """Elements of a row of dimension 0 where blocks end with them, else 0."""
    if value.dim() == 0 or value.shape[0] < 2:
        return 0
    row = value.numel() // value.shape[0]
    ends = value.stride(0) == row and row > _BLOCK and row % _BLOCK
    return row if ends and row < 2**32 else 0


def _room(row: int) -> int:
    """The scales that a chunk has room for."""
    return _CHUNK // _BLOCK + (_CHUNK // row + 2 if row else 0)


def _count(value: Tensor) -> int:
    row, elements = _row(value), value.numel()
    return -(-elements // _CHUNK) * _room(row) if row else -(-elements // _BLOCK)


def _slots(value: Tensor, row: int) -> Tensor:
    """Of each element its place in a table with a line of 64 for each scale."""
    at = torch.arange(value.numel(), device=value.device)
    chunk = at // _CHUNK
    begin = torch.maximum(at - at % row, chunk * _CHUNK)
    within = (at - begin) % _BLOCK
    block = (within == 0).cumsum(0)
    block = block - block[chunk * _CHUNK] + chunk * _room(row)
    return block * _BLOCK + within


def _table(value: Tensor) -> Tensor:
    """The elements in the order of memory, a block per line, with zeros where none are."""
    flat = value.detach().as_strided((value.numel(),), (1,), value.storage_offset())
    row = _row(value)
    if not row and flat.numel() % _BLOCK == 0:
        return flat.view(-1, _BLOCK)
    table = flat.new_zeros(_count(value) * _BLOCK)
    if row:
        table[_slots(value, row)] = flat
    else:
        table[: flat.numel()] = flat
    return table.view(-1, _BLOCK)


def _shaped(table: Tensor, like: Tensor) -> Tensor:
    """The elements of a table as a tensor of that shape and these strides."""
    row, flat = _row(like), table.reshape(-1)
    flat = flat[_slots(like, row)] if row else flat[: like.numel()]
    return flat.as_strided(like.shape, like.stride())


def _encode(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes of a tensor without gaps, and their scales."""
    table, is_signed = _table(value), dtype is torch.int8
    terms = table if is_signed else table.sqrt()
    largest, most = terms.abs().amax(1, keepdim=True), _MOST if is_signed else _MOST**0.5
    up = (largest.view(torch.int32) + (0xFFFF - _SLACK)).bitwise_and_(-0x10000).view(torch.float32)
    scales = torch.where(largest <= most, torch.where(up < _LEAST, 0.0, up), torch.nan)
    if is_signed:
        numbers = terms / (torch.where(scales > 0, scales, torch.inf) + terms.abs()) * 254.0
    else:
        numbers = terms * torch.where(scales > 0, torch.full_like(scales, 255.0) / scales, 0.0)
        numbers = torch.where(terms > 0, numbers.clamp(min=1.0), numbers)
    codes = torch.where(scales.isnan(), 0.0, numbers).round().to(dtype)
    return _shaped(codes, value), scales.view(-1).to(torch.bfloat16)


def _decode(codes: Tensor, scales: Tensor) -> Tensor:
    table, scale = _table(codes).float(), scales.float().view(-1, 1)
    if codes.dtype is torch.int8:
        numbers = scale * (table / (254.0 - table.abs()))
    else:
        numbers = (table * (scale * (1 / 255))).square()
    return _shaped(numbers, codes)
