"""States of bitsandbytes and FlashOptim, in state dicts, as those of torch's classes.

bitsandbytes keeps a code per element, a table of the 256 values of codes (`qmap1`), and a scale per
block of elements (`absmax1`), or one for all (`max1`). FlashOptim keeps a code per element, and a
float16 scale per 32 of them: of a soft sign, or of a root where codes have no sign; and the rest of
a float32 parameter as `error_bits`, in halves of the last place of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .request import Steppable

_NESTED = "__bnb_optimizer_quant_state__"  # where newer versions of bitsandbytes keep its entries
_BLOCKS = (256, 2048)  # elements, in newer versions and older ones
_FLASH_BLOCK = 32
_CODES, _SCALES, _ERRORS = "::quantized", "::scales", "error_bits"
_GROUP_KEYS = ("master_bytewidth", "quantize")  # FlashOptim's


def translated(
    optimizer: Steppable, groups: list[dict[str, Any]], state_dict: dict[str, Any]
) -> dict[str, Any]:
    """A state dict in torch's format, with float32 states; one in that format itself.

    Raises:
        ValueError: a part of a state is missing, or does not fit the others or the parameter.
    """
    states = state_dict.get("state", {})
    if not any(_is_foreign(state) for state in states.values()):
        return state_dict
    made = dict(states)
    saved = state_dict["param_groups"]
    pairs = zip(groups, saved)  # noqa: B905 - torch says what does not fit
    for group, its in pairs:
        names = optimizer._formula_of({**group, **its}).state_keys
        for key, param in zip(its["params"], group["params"]):  # noqa: B905 - as above
            if _is_foreign(state := states.get(key)):
                try:
                    made[key] = _translated(state, names, optimizer._numbers, param, its)
                except ValueError as error:
                    text = f"load_state_dict(): the state of parameter {key!r}: {error}"
                    raise ValueError(text) from None
    filled = [
        {**{k: v for k, v in group.items() if k != "params"}, **its}
        for group, its in zip(groups, saved, strict=True)
    ]
    for group in filled:
        for name in _GROUP_KEYS:
            group.pop(name, None)
    return {**state_dict, "state": made, "param_groups": filled}


def _is_foreign(state: object) -> bool:
    return isinstance(state, Mapping) and any(
        key in ("state1", _NESTED, _ERRORS) or str(key).endswith((_CODES, _SCALES)) for key in state
    )


def _translated(
    state: Mapping[str, Any],
    names: tuple[str, ...],
    numbers: tuple[str, ...],
    param: Tensor,
    group: Mapping[str, Any],
) -> dict[str, Any]:
    state = {**state, **state.get(_NESTED, {})}
    made: dict[str, Any] = {}
    for place, name in enumerate(name for name in names if name not in ("step", *numbers)):
        number = place + 1
        if f"state{number}" in state:
            made[name] = _of_map(state, number, param)
        elif name + _CODES in state or name + _SCALES in state:
            made[name] = _of_flash(state, name, param)
        elif name in state:
            made[name] = state[name]
    if "step" in names:
        made = {"step": torch.tensor(float(_part(state, "step", "the states"))), **made}
    if _ERRORS in state:
        made["master_weights"] = _of_errors(state[_ERRORS], param, group)
    return made


def _part(state: Mapping[str, Any], key: str, beside: str) -> Any:
    if key not in state:
        raise ValueError(f"{key!r} is missing beside {beside}")
    return state[key]


def _flat(value: Tensor, key: str, param: Tensor) -> Tensor:
    """The elements in the order of memory, which is the parameter's."""
    if value.numel() != param.numel():
        shapes = tuple(value.shape), tuple(param.shape)
        raise ValueError("{!r} has the shape {}, and the parameter {}".format(key, *shapes))
    if value.shape != param.shape:
        return value.reshape(-1)
    like = torch.empty_like(param, dtype=value.dtype, device=value.device)
    return like.copy_(value).as_strided((value.numel(),), (1,))


def _shaped(flat: Tensor, param: Tensor) -> Tensor:
    like = torch.empty_like(param, dtype=torch.float32, device=flat.device)
    like.as_strided((like.numel(),), (1,)).copy_(flat)
    return like


def _of_map(state: Mapping[str, Any], number: int, param: Tensor) -> Tensor:
    key = f"state{number}"
    codes = _flat(state[key], key, param)
    if codes.is_floating_point():
        return _shaped(codes, param)
    values = _part(state, f"qmap{number}", repr(key)).float()[codes.long()]
    if f"max{number}" in state:
        return _shaped(values * state[f"max{number}"].float(), param)
    scales = _part(state, f"absmax{number}", repr(key)).float()
    count = codes.numel()
    size = next((one for one in _BLOCKS if -(-count // one) == scales.numel()), None)
    if size is None or values.numel() != count:
        raise ValueError(f"'absmax{number}' has {scales.numel()} scales for {count} elements")
    return _shaped(values * scales.repeat_interleave(size)[:count], param)


def _of_flash(state: Mapping[str, Any], name: str, param: Tensor) -> Tensor:
    codes, scales = name + _CODES, name + _SCALES
    flat = _flat(_part(state, codes, repr(scales)), codes, param)
    found: Tensor = _part(state, scales, repr(codes))
    if found.dtype is torch.bfloat16:  # so that torch leaves its bits alone
        found = found.view(torch.float16)
    if found.numel() != -(-flat.numel() // _FLASH_BLOCK):
        raise ValueError(f"{scales!r} has {found.numel()} scales for {flat.numel()} elements")
    scale = found.float().repeat_interleave(_FLASH_BLOCK)[: flat.numel()]
    if flat.dtype is torch.uint8:
        return _shaped((flat.float() / 255 * scale).square(), param)
    part = flat.float() / 127
    return _shaped(part / (2 - part.abs()) * scale, param)


def _of_errors(errors: Tensor, param: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The float32 parameter."""
    width = group.get("master_bytewidth") or param.itemsize + errors.itemsize
    is_short = width - param.itemsize == 1
    mantissa = {torch.bfloat16: 7, torch.float16: 10}.get(param.dtype)
    if mantissa is None or width - param.itemsize not in (1, 2):
        raise ValueError(f"{_ERRORS!r} are of a parameter in 16 bits, and not of {param.dtype}")
    if errors.is_floating_point() and not is_short:
        errors = errors.view(torch.int16)
    values = param.detach().float()
    exponent = torch.frexp(values.abs())[1] - 1  # of 1 to 2
    exponent = exponent.clamp(min=-126 if mantissa == 7 else -14)
    exponent = torch.where(values == 0, -126 if mantissa == 7 else -14, exponent)
    part = _flat(errors, _ERRORS, param).double() / (127 if is_short else 32767)
    half_place = 2.0 ** (exponent - mantissa - 1).double()
    return _shaped(
        _flat(values.double(), "parameter", param) + part * _flat(half_place, "parameter", param),
        param,
    )
