"""One process that keeps fp32 parameters and rounds them, beside a run with masters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from faststep.optim.masters import MASTER

from .common import NUMBERS, SHAPES, Given, mean_of

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float64]


def wide_of(model: nn.Module) -> Given:
    """The same model, with bf16 and fp16 parameters in fp32."""
    whole = Given(SHAPES, DTYPES)
    for wide, param in zip(whole.parameters(), model.parameters(), strict=True):
        wide.data = param.data.to(torch.promote_types(param.dtype, torch.float32), copy=True)
    return whole


def step_whole(
    whole: nn.Module, optimizer: Any, ranks: Sequence[Sequence[Tensor]], nodes: int = 1
) -> None:
    """A step by the mean of low-precision gradients."""
    for param, parts in zip(whole.parameters(), zip(*ranks, strict=True), strict=True):
        rows = [part * (1.0 / len(parts)) for part in parts]
        wide = torch.promote_types(param.dtype, torch.float32)
        if nodes > 1 or rows[0].dtype == wide:
            mean = mean_of(parts, nodes)
        else:  # slices are fp32
            mean = torch.zeros_like(param, dtype=wide)
            for first in range(0, len(rows), 2):
                two = [row.to(wide) for row in rows[first : first + 2]]
                mean = (two[0] if first == 0 else mean + two[0]) + sum(two[1:])
        param.grad_dtype = None
        param.grad = torch.empty_like(param, dtype=wide).copy_(mean)
    optimizer.step()
    optimizer.zero_grad()


def follow(whole: nn.Module, model: nn.Module) -> None:
    """What a script has written to parameters counts more than what was rounded to them."""
    with torch.no_grad():
        for wide, param in zip(whole.parameters(), model.parameters(), strict=True):
            moved = wide.to(param.dtype) != param
            wide.copy_(torch.where(moved, param.to(wide.dtype), wide))


def unlike(sharded: Any, model: nn.Module, whole: nn.Module, reference: Any) -> list[str]:
    """Which parameters, states and masters of this rank are not those of the reference."""
    of = dict(zip(map(id, model.parameters()), whole.parameters(), strict=True))
    pairs = zip(model.named_parameters(), whole.parameters(), strict=True)
    wrong = [name for (name, p), wide in pairs if not torch.equal(p, wide.to(p.dtype))]
    if sharded._engine is None:
        pieces = [(f"p{n}", p, p, 0) for n, p in enumerate(model.parameters())]
    else:
        pieces = [
            (slot.name, slot.param, slot.part.values, slot.part.begin)
            for slot in sharded._engine.slots
            if slot.part is not None
        ]
    for name, param, piece, begin in pieces:
        wide = of[id(param)]
        expected = dict(reference.state.get(wide, {}))
        if wide.dtype != param.dtype:
            expected[MASTER] = wide.detach()
        mine = sharded.state.get(piece, {})
        if list(mine) != list(expected):
            wrong.append(f"{name} has {list(mine)}, not {list(expected)}")
            continue
        for key, value in expected.items():
            found = mine[key]
            if key not in NUMBERS:
                value = _flat(value, wide)[begin : begin + piece.numel()]
                found = _flat(found, piece)
            if not torch.equal(found, value) or found.dtype != value.dtype:
                wrong.append(f"{name} {key}")
    return wrong


def _flat(value: Tensor, like: Tensor) -> Tensor:
    """Elements in the order of another tensor's memory."""
    return torch.empty_like(like, dtype=value.dtype).copy_(value).as_strided((value.numel(),), (1,))
