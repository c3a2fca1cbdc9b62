"""Values: what torch's fused CUDA optimizers compute, within the tolerances that torch's own tests
allow between its fused and its plain optimizers, those of torch.testing.assert_close.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import faststep
from optim.common import DTYPES, dtype_name
from optim.declarations import SGD, TORCHS, Declaration

from .common import CUDA, REHEARSAL, place, same_bits, values

HALF = (torch.bfloat16, torch.float16)
SHAPES = ((40, 50), (257,), (1,), (3, 4, 5))
SETTINGS = [
    pytest.param(d, kwargs, id=f"{d.name}-{name}")
    for d in TORCHS
    for name, kwargs in {"usual": d.kwargs, "other": d.other, **d.variants}.items()
]


def two_sets(dtype: torch.dtype) -> list[list[torch.nn.Parameter]]:
    return [
        [torch.nn.Parameter(place(values(s, i, dtype), CUDA)) for i, s in enumerate(SHAPES)]
        for _ in range(2)
    ]


def set_grads(sets: list[list[torch.nn.Parameter]], step: int, factor: float = 1.0) -> None:
    for i, (p, q) in enumerate(zip(*sets, strict=True)):
        grad = place(values(tuple(p.shape), 1000 * step + i, p.dtype), CUDA, factor)
        p.grad, q.grad = grad, grad.clone()


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """torch's; in 16 bits what is near zero is a difference of larger numbers that were rounded."""
    eps = torch.finfo(dtype).eps
    return {"rtol": 2 * eps, "atol": eps} if dtype in HALF else {}


def assert_close(sets: list[list[torch.nn.Parameter]], ours: Any, theirs: Any) -> None:
    for p, q in zip(*sets, strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach().cpu(), **tolerance(q.dtype))
        assert set(theirs.state[q]) <= set(ours.state[p])
        for key, value in theirs.state[q].items():
            if value is not None:
                mine = ours.state[p][key].cpu()
                torch.testing.assert_close(mine, value.cpu(), **tolerance(value.dtype))


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("declaration", "kwargs"), SETTINGS)
def test_against_fused(
    declaration: Declaration, kwargs: dict[str, Any], dtype: torch.dtype, maximize: bool
) -> None:
    if REHEARSAL and declaration is SGD and dtype in HALF:
        pytest.skip("torch's fused SGD for CPUs is not right in 16 bits")
    sets = two_sets(dtype)
    assert declaration.torchs is not None
    ours = declaration.ours(sets[0], **kwargs, maximize=maximize)
    theirs = declaration.torchs(sets[1], **kwargs, maximize=maximize, fused=True)
    for step in range(5):
        set_grads(sets, step)
        ours.step()
        theirs.step()
    assert_close(sets, ours, theirs)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "explicit"])
def test_chain_against_torchs(inside: bool) -> None:
    """unscale_, clip_grad_norm_, step and update, with an overflow on the way."""
    sets = two_sets(torch.float32)
    ours = faststep.optim.AdamW(sets[0], lr=1e-2)
    theirs = torch.optim.AdamW(sets[1], lr=1e-2, fused=True)
    options: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}
    scaler = faststep.amp.GradScaler("cuda", **options)
    torchs = torch.amp.GradScaler("cuda", **options)
    for s in (scaler, torchs):
        s.scale(torch.zeros((), device=CUDA))
    for step in range(8):
        set_grads(sets, step, float(torchs.get_scale()))
        if step == 3:
            for parameters in sets:
                parameters[1].grad[100] = float("inf")
        if inside:
            scaler.step(ours, max_norm=0.5)
        else:
            scaler.unscale_(ours)
            faststep.clip_grad_norm_(sets[0], 0.5)
            scaler.step(ours)
        scaler.update()
        torchs.unscale_(theirs)
        torch.nn.utils.clip_grad_norm_(sets[1], 0.5)
        torchs.step(theirs)
        torchs.update()
        assert ours.step_was_skipped is (step == 3)
        assert same_bits(scaler._scale.cpu(), torchs._scale.cpu())
        assert_close(sets, ours, theirs)
