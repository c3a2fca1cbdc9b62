"""Hyper-parameters, tensor sizes and torch's other implementations, beyond the runner's product."""

from typing import Any

import pytest
import torch

from . import references
from .common import (
    DTYPES,
    ONE_STEP,
    assert_near,
    assert_same_bits,
    dtype_name,
    parameters,
    set_gradients,
    train,
)
from .declarations import ALL, OTHERS, SGD, TORCHS, Declaration

IMPLEMENTATIONS = ({"foreach": False}, {"foreach": True}, {"fused": True})

# Below, at and above the widths that vector loops, scratch blocks and chunks are made of.
SIZES = [
    *range(1, 34),
    63,
    64,
    65,
    127,
    255,
    511,
    512,
    513,
    1023,
    1025,
    4095,
    4097,
    16383,
    16384,
    16385,
    65537,
]


def variants(declarations: tuple[Declaration, ...]) -> list[Any]:
    return [
        pytest.param(declaration, kwargs, id=f"{declaration.name}-{name}")
        for declaration in declarations
        for name, kwargs in {**declaration.variants, "product": declaration.kwargs}.items()
    ]


def torchs_runs(
    declaration: Declaration, kwargs: dict[str, Any], dtype: torch.dtype
) -> list[dict[str, Any]]:
    """The arguments for each of torch's implementations that gives the right result here."""
    runs = []
    for implementation in IMPLEMENTATIONS:
        tensors = any(torch.is_tensor(v) or isinstance(v, tuple) for v in kwargs.values())
        if tensors and implementation.get("foreach"):
            continue  # torch refuses tensors as hyper-parameters
        if "fused" in implementation and not declaration.takes("fused"):
            continue
        low = dtype in (torch.bfloat16, torch.float16)
        if low and "momentum" in kwargs and declaration is SGD and implementation.get("fused"):
            continue  # torch 2.13's vector loop never stores this momentum buffer
        runs.append({**kwargs, **implementation})
    return runs


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("declaration", "kwargs"), variants(TORCHS + OTHERS))
def test_variant_against_torch(
    declaration: Declaration, kwargs: dict[str, Any], dtype: torch.dtype
) -> None:
    shapes = ((33,), (7, 5), ())
    ours = parameters(*shapes, dtype=dtype)
    train(declaration.ours(ours, **kwargs), ours, steps=3)
    for arguments in torchs_runs(declaration, kwargs, dtype):
        torchs = parameters(*shapes, dtype=dtype)
        train(declaration.torchs(torchs, **arguments), torchs, steps=3)
        for p, q in zip(ours, torchs, strict=True):
            assert_near(p, q, declaration.tolerance, f"{arguments}")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("declaration", "kwargs"), variants(ALL + OTHERS))
def test_variant_against_fp64(
    declaration: Declaration, kwargs: dict[str, Any], dtype: torch.dtype
) -> None:
    params = parameters((257,), dtype=dtype)
    optimizer = declaration.ours(params, **kwargs)
    group, p = optimizer.param_groups[0], params[0]
    for step in range(5):
        state = {key: value.double() for key, value in optimizer.state.get(p, {}).items()}
        set_gradients(params, step)
        expected, moments = declaration.reference(
            p.detach().double(), p.grad.double(), state, group
        )
        optimizer.step()
        assert_near(p, expected, ONE_STEP, f"step {step}")
        for key in declaration.moments(group):
            state, what = optimizer.state[p][key], f"step {step}, {key}"
            assert_near(state, moments[key], ONE_STEP, what, declaration.terms)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
def test_every_size(declaration: Declaration, dtype: torch.dtype) -> None:
    """All tails of vector loops and chunks, all in one step, and 300 small tensors among them."""
    shapes = [(size,) for size in SIZES] + [(3, 5)] * 300
    params = parameters(*shapes, dtype=dtype)
    starts = [p.detach().to(torch.float64, copy=True) for p in params]
    optimizer = declaration.ours(params, **declaration.kwargs)
    set_gradients(params, 0)
    optimizer.step()
    group = optimizer.param_groups[0]
    for p, start in zip(params, starts, strict=True):
        expected, _ = declaration.reference(start, p.grad.double(), {}, group)
        assert_near(p, expected, ONE_STEP, f"{p.numel()} elements")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
def test_one_list_or_many(declaration: Declaration, dtype: torch.dtype) -> None:
    """A tensor's result does not depend on its neighbours, its group or its place in memory, and
    between tensors nothing is written."""
    shapes = [(5,), (1000,), (3, 4), (70001,), ()]
    together, alone = parameters(*shapes, dtype=dtype), parameters(*shapes, dtype=dtype)
    storage = torch.zeros(80_000, dtype=dtype)
    moved, offset = [], 1
    for p in parameters(*shapes, dtype=dtype):
        view = storage[offset : offset + p.numel()].view(p.shape)
        moved.append(torch.nn.Parameter(view.copy_(p.detach())))
        offset += p.numel() + 1
        storage[offset - 1] = torch.nan
    for params, groups in (
        (together, [{"params": together}]),
        (alone, [{"params": [p]} for p in alone]),
        (moved, [{"params": moved[::-1]}]),
    ):
        optimizer = declaration.ours(groups, **declaration.kwargs)
        train(optimizer, params, steps=3)
    assert_same_bits(together, alone, "one group or one per tensor")
    assert_same_bits(together, moved, "own memory or odd offsets in a shared storage")
    assert storage.isnan().sum() == len(shapes)


@pytest.mark.parametrize(
    ("declaration", "flag"),
    [(d, flag) for d in TORCHS + OTHERS for flag in ("foreach", "fused") if d.takes(flag)],
    ids=lambda value: getattr(value, "name", value),
)
def test_flags_change_nothing(declaration: Declaration, flag: str) -> None:
    results = []
    for value in (False, True):
        params = parameters((33,), (4, 5))
        train(declaration.ours(params, **declaration.kwargs, **{flag: value}), params, steps=3)
        results.append(params)
    assert_same_bits(*results, flag)


@pytest.mark.parametrize("declaration", TORCHS + OTHERS, ids=lambda d: d.name)
def test_reference_agrees_with_torch_in_fp64(declaration: Declaration) -> None:
    """The fp64 references are torch's for-loop to the last digits, over twenty steps."""
    for kwargs in [declaration.kwargs, *declaration.variants.values()]:
        params = parameters((50,), dtype=torch.float64)
        optimizer = declaration.torchs(params, **kwargs, foreach=False)
        value, state = params[0].detach().clone(), {}
        for step in range(20):
            set_gradients(params, step)
            group = optimizer.param_groups[0]
            value, state = declaration.reference(value, params[0].grad, state, group)
            optimizer.step()
        torch.testing.assert_close(params[0].detach(), value, rtol=1e-9, atol=1e-9)


def test_lion_reference_by_hand() -> None:
    """Two steps of Lion worked out on paper."""
    h = {"lr": 0.5, "betas": (0.5, 0.25), "weight_decay": 0.5, "maximize": False}
    p, state = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64), {}
    p, state = references.lion(p, torch.tensor([2.0, -4.0, 0.0]).double(), state, h)
    assert p.tolist() == [0.25, -1.0, 3.0]
    assert state["exp_avg"].tolist() == [1.5, -3.0, 0.0]
    p, state = references.lion(p, torch.tensor([-2.0, 1.0, -1.0]).double(), state, h)
    assert p.tolist() == [0.6875, -0.25, 2.75]
    assert state["exp_avg"].tolist() == [-1.125, 0.0, -0.75]


@pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
def test_lr_tensor_is_read_every_step(declaration: Declaration) -> None:
    """An lr tensor changed in place, and one replaced by a float, take effect at once."""
    by_tensor, by_float = parameters((31,)), parameters((31,))
    lr = torch.tensor(0.5)
    left = declaration.ours(by_tensor, **{**declaration.kwargs, "lr": lr})
    right = declaration.ours(by_float, **{**declaration.kwargs, "lr": 0.5})
    train(left, by_tensor)
    train(right, by_float)
    lr.fill_(0.25)
    right.param_groups[0]["lr"] = 0.25
    train(left, by_tensor, seed=1)
    train(right, by_float, seed=1)
    assert_same_bits(by_tensor, by_float, "lr as a tensor and as a float")
