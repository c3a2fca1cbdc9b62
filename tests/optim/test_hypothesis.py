"""Generated shapes, strides, values and hyper-parameters, against torch's for-loop."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from .common import DTYPES, TOLERANCE, generator
from .declarations import ADAM, ADAMW, LION, SGD, Declaration
from .references import total_norm

# Zeros of both signs, denormals, the edges of fp32, and squares that overflow it or do not.
SPECIAL = (
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    1.2e-38,
    1e-20,
    1e-8,
    1.0,
    -1.0,
    255.0,
    3e4,
    1e10,
    -2e19,
    3e19,
    6e20,
    3e38,
    math.inf,
    -math.inf,
    math.nan,
)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(shape, order of the dimensions in memory, gap after each of them)."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    gaps = tuple(draw(st.sampled_from((0, 0, 1, 3))) for _ in shape)
    return shape, order, gaps


def place(value: Tensor, geometry: tuple[tuple[int, ...], ...], offset: int = 0) -> Tensor:
    """A copy of value laid out with this geometry in a larger, poisoned storage."""
    shape, order, gaps = geometry
    stride, step = [0] * len(shape), 1
    for d in reversed(order):
        stride[d] = step
        step *= max(shape[d], 1) + gaps[d]
    storage = torch.full((step + offset,), 77.0, dtype=value.dtype)
    return storage.as_strided(shape, stride, offset).copy_(value)


def holes(t: Tensor) -> Tensor:
    """The storage around t's elements."""
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    mask = torch.ones(whole.numel(), dtype=torch.bool)
    mask.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(False)
    return whole[mask]


@st.composite
def hyper_parameters(draw: st.DrawFn) -> tuple[Declaration, dict[str, Any]]:
    declaration = draw(st.sampled_from((ADAMW, ADAM, SGD, LION)))
    unit = st.sampled_from((0.0, 0.5, 0.9, 0.99))
    h: dict[str, Any] = {
        "lr": draw(st.sampled_from((0.0, 1e-3, 0.1))),
        "weight_decay": draw(st.sampled_from((0.0, 0.1))),
        "maximize": draw(st.booleans()),
    }
    if declaration is SGD:
        h["momentum"] = draw(unit)
        h["nesterov"] = h["momentum"] > 0 and draw(st.booleans())
        h["dampening"] = 0.0 if h["nesterov"] else draw(unit)
        return declaration, h
    h["betas"] = (draw(unit), draw(unit))
    if declaration is not LION:
        h["amsgrad"] = draw(st.booleans())
        h["eps"] = draw(st.sampled_from((1e-8, 1e-3)))
    return declaration, h


def lion_for_loop(params: list[Parameter], h: dict[str, Any], steps: list[list[Tensor]]) -> None:
    """Lion in torch operators on the parameter's dtype; the sign of a NaN is a NaN."""
    (beta1, beta2), sign = h["betas"], -1.0 if h["maximize"] else 1.0
    moments = [torch.zeros_like(p) for p in params]
    with torch.no_grad():
        for gradients in steps:
            for p, m, g in zip(params, moments, gradients, strict=True):
                p.mul_(1.0 - h["lr"] * h["weight_decay"])
                update = m * beta1 + g * (sign * (1.0 - beta1))
                p.sub_(torch.where(update.isnan(), update, update.sign()) * h["lr"])
                m.mul_(beta2).add_(g * (sign * (1.0 - beta2)))


def for_loop(
    declaration: Declaration, params: list[Parameter], h: dict[str, Any], steps: list[list[Tensor]]
) -> None:
    if declaration is LION:
        lion_for_loop(params, h, steps)
        return
    optimizer = declaration.torchs(params, **h, foreach=False)
    for gradients in steps:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        optimizer.step()


def ours(
    declaration: Declaration, params: list[Parameter], h: dict[str, Any], steps: list[list[Tensor]]
) -> torch.optim.Optimizer:
    optimizer = declaration.ours(params, **h)
    for gradients in steps:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        optimizer.step()
    return optimizer


@given(
    settings_=hyper_parameters(),
    dtype=st.sampled_from(DTYPES),
    layouts=st.lists(
        st.tuples(geometries(), st.permutations((0, 1, 2, 3)), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=120)
def test_any_shape_and_strides(
    settings_: tuple[Declaration, dict[str, Any]],
    dtype: torch.dtype,
    layouts: list[tuple[Any, Any, int]],
    seed: int,
) -> None:
    """Parameter and gradient laid out independently; what lies between elements stays untouched."""
    declaration, h = settings_
    source = generator(seed)
    mine, theirs, gradients, plain = [], [], [], []
    for (shape, order, gaps), other, offset in layouts:
        value = torch.rand(shape, generator=source, dtype=torch.float64).add(0.25).to(dtype)
        grad_order = tuple(d for d in other if d < len(shape))
        g = torch.rand(shape, generator=source, dtype=torch.float64).sub(1.25).to(dtype)
        mine.append(Parameter(place(value, (shape, order, gaps), offset)))
        theirs.append(Parameter(value.clone()))
        gradients.append(place(g, (shape, grad_order, gaps[::-1]), 3 - offset))
        plain.append(g)
    copies = [holes(p.detach()).clone() for p in mine]
    grad_copies = [g.clone() for g in gradients]
    ours(declaration, mine, h, [gradients, gradients])
    for_loop(declaration, theirs, h, [plain, plain])
    for p, q, untouched in zip(mine, theirs, copies, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), **TOLERANCE[dtype])
        assert torch.equal(holes(p.detach()), untouched), "wrote between the elements"
    assert all(map(torch.equal, gradients, grad_copies)), "a plain step writes no gradient"


def same_kind(a: Tensor, b: Tensor) -> Tensor:
    """Both NaN, or the same infinity, or both finite."""
    kinds = (torch.isnan, torch.isposinf, torch.isneginf)
    return torch.stack([kind(a) == kind(b) for kind in kinds]).all(0)


@given(
    settings_=hyper_parameters(),
    values=st.lists(st.tuples(*[st.sampled_from(SPECIAL)] * 3), min_size=1, max_size=40),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
@settings(max_examples=200)
def test_special_values(
    settings_: tuple[Declaration, dict[str, Any]],
    values: list[tuple[float, float, float]],
    dtype: torch.dtype,
) -> None:
    """NaN and infinities appear exactly where torch's arithmetic has them; denormals survive."""
    declaration, h = settings_
    table = torch.tensor(values, dtype=torch.float64).to(dtype)
    start, gradients = table[:, 0], [[table[:, 1].clone()], [table[:, 2].clone()]]
    mine, theirs = [Parameter(start.clone())], [Parameter(start.clone())]
    ours(declaration, mine, h, gradients)
    for_loop(declaration, theirs, h, gradients)
    p, q = mine[0].detach(), theirs[0].detach()
    if dtype == torch.float64 or declaration in (SGD, LION):
        assert same_kind(p, q).all(), (p[~same_kind(p, q)], q[~same_kind(p, q)])
    finite = torch.isfinite(p) & torch.isfinite(q)
    torch.testing.assert_close(p[finite], q[finite], rtol=1e-5, atol=1e-30)


@given(
    values=st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from(SPECIAL[:16]),
        min_size=1,
        max_size=50,
    ),
    split=st.integers(1, 7),
    max_norm=st.sampled_from((0.0, 1e-3, 1.0, 1e20)),
)
@settings(max_examples=100)
def test_norm_of_anything(values: list[float], split: int, max_norm: float) -> None:
    """last_grad_norm against a correctly rounded sum, however the list is split."""
    flat = torch.tensor(values, dtype=torch.float32)
    pieces = list(flat.split(split))
    params = [Parameter(torch.zeros_like(piece)) for piece in pieces]
    optimizer = SGD.ours(params, lr=1.0, max_grad_norm=max_norm)
    for p, g in zip(params, pieces, strict=True):
        p.grad = g.clone()
    optimizer.step()
    norm = total_norm(pieces)
    assert optimizer.last_grad_norm.item() == pytest.approx(
        torch.tensor(norm).item(), rel=1e-6, abs=1e-45
    )
    # the factor itself is a float32, as in torch: below 2^-126 it has fewer digits
    coefficient = torch.tensor(min(1.0, max_norm / (norm + 1e-6)), dtype=torch.float32).item()
    for p, g in zip(params, pieces, strict=True):
        expected = (g.double() * -coefficient).float()
        torch.testing.assert_close(p.detach(), expected, rtol=2e-6, atol=1e-37)
