"""Every optimizer x dtype x layout x groups x chain, any three of them together.

Each step is compared with one fp64 step from the same start (what the arithmetic must be), and
the whole run with torch's class (what a user would have got).
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import faststep
from combinations import of_three

from .common import DTYPES, ONE_STEP, assert_near, dtype_name, generator
from .declarations import ALL, OTHERS, Declaration
from .layouts import LAYOUTS, Layout
from .references import clip_coefficient, total_norm

SCALE = 16.0
STEPS = 3


@dataclass(frozen=True)
class Chain:
    """Which scaler drives the step and who clips."""

    scaler: str
    clip: str

    def __str__(self) -> str:
        return f"{self.scaler}_scaler-{self.clip}"


CHAINS = (
    Chain("no", "no_clip"),
    Chain("no", "max_grad_norm"),
    Chain("torch", "no_clip"),
    Chain("torch", "max_grad_norm"),
    Chain("faststep", "no_clip"),
    Chain("faststep", "max_grad_norm"),
    Chain("faststep", "scaler_max_norm"),
)


def works_in_torch(layout: Layout, chain: Chain) -> bool:
    """A gradient with stride 0 cannot be written, which torch's scaler and a plain step do."""
    if chain.scaler == "torch" and not layout.unscaled_by_torch:
        return False
    if layout.written_back or chain.scaler == "no":
        return True
    return chain.scaler == "faststep" and chain.clip != "no_clip"


CASES = of_three(
    [
        (declaration, dtype, layout, groups, chain)
        for declaration, dtype, layout, groups, chain in itertools.product(
            ALL, DTYPES, LAYOUTS, ("minimize", "maximize", "several"), CHAINS
        )
        if works_in_torch(layout, chain)
    ]
)
# What differs is the rule: its arithmetic, its states, and how many there are.
CASES += of_three(
    [
        (declaration, dtype, layout, groups, chain)
        for declaration, dtype, layout, groups, chain in itertools.product(
            OTHERS, DTYPES, LAYOUTS[:3], ("minimize", "maximize", "several"), CHAINS[::3]
        )
        if works_in_torch(layout, chain)
    ]
)


class Model:
    """Parameters in one group, or in three of which one maximizes, and their gradients by seed."""

    def __init__(
        self, declaration: Declaration, dtype: torch.dtype, layout: Layout, groups: str
    ) -> None:
        self.layout = layout
        source = generator(1)
        lists = [layout.parameters(dtype, source)]
        if groups == "several":
            narrow = torch.bfloat16 if dtype == torch.float32 else torch.float32
            lists += [layout.parameters(dtype, source), layout.parameters(narrow, source)]
        overrides: list[dict[str, Any]] = [{}, declaration.other, {"maximize": True}]
        self.groups = [{"params": ps, **h} for ps, h in zip(lists, overrides, strict=False)]
        self.params: list[Parameter] = [p for ps in lists for p in ps]
        self.max_norm = 0.5 * total_norm(self.gradients(0))

    def gradients(self, step: int) -> list[Tensor]:
        source, layout = generator(100 + step), self.layout
        return [layout.gradient(p, layout.grad_dtype or p.dtype, source) for p in self.params]


def run_ours(model: Model, declaration: Declaration, kwargs: dict[str, Any], chain: Chain) -> None:
    """Trains with our class and checks each step against fp64."""
    if chain.clip == "max_grad_norm":
        kwargs = {**kwargs, "max_grad_norm": model.max_norm}
    optimizer = declaration.ours(model.groups, **kwargs)
    optimizer._step_supports_amp_scaling = True  # as fused=True: torch's unscale_ refuses float16
    scaler_class = {"torch": torch.amp.GradScaler, "faststep": faststep.amp.GradScaler}
    scaler = None
    if chain.scaler != "no":
        scaler = scaler_class[chain.scaler]("cpu", init_scale=SCALE)
        scaler.scale(torch.zeros(()))
    extra = {"max_norm": model.max_norm} if chain.clip == "scaler_max_norm" else {}
    for step in range(STEPS):
        gradients = model.gradients(step)
        for p, g in zip(model.params, gradients, strict=True):
            p.grad = g if scaler is None else scaled(g)
        max_norm = math.inf if chain.clip == "no_clip" else model.max_norm
        expected = reference_step(optimizer, declaration, gradients, max_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer, **extra)
            scaler.update()
        compare_step(optimizer, declaration, expected, f"step {step}")


def scaled(g: Tensor) -> Tensor:
    """g * SCALE (a power of two, so exact) with g's own strides."""
    if 0 in g.stride():
        return (g[..., :1] * SCALE).expand(g.shape)
    if g.is_neg():
        return torch._neg_view(scaled(torch._neg_view(g)))
    return torch.empty_strided(g.shape, g.stride(), dtype=g.dtype).copy_(g * SCALE)


def reference_step(
    optimizer: torch.optim.Optimizer,
    declaration: Declaration,
    grads: list[Tensor],
    max_norm: float,
) -> list[tuple[Tensor, dict[str, Any]]]:
    """What fp64 makes of the optimizer's present parameters and states."""
    coefficient = clip_coefficient(total_norm(grads), max_norm)
    expected, remaining = [], iter(grads)
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = {
                key: value.double() if torch.is_tensor(value) else value
                for key, value in optimizer.state.get(p, {}).items()
            }
            g = next(remaining).double() * coefficient
            expected.append(declaration.reference(p.detach().double(), g, state, group))
    return expected


def compare_step(
    optimizer: torch.optim.Optimizer,
    declaration: Declaration,
    expected: list[tuple[Tensor, dict[str, Any]]],
    what: str,
) -> None:
    remaining = iter(expected)
    for group in optimizer.param_groups:
        for index, p in enumerate(group["params"]):
            value, state = next(remaining)
            where = f"{what}, parameter {index} {tuple(p.shape)} {p.dtype}"
            assert_near(p, value, ONE_STEP, where)
            for key in declaration.moments(group):
                moment, of_it = optimizer.state[p][key], f"{where}, {key}"
                assert_near(moment, state[key], ONE_STEP, of_it, declaration.terms)
            for key in declaration.numbers:
                assert optimizer.state[p][key].item() == state[key], f"{where}, {key}"
            if "step" in declaration.state:
                assert optimizer.state[p]["step"].item() == state["step"], where


@functools.cache
def run_torch(
    declaration: Declaration,
    dtype: torch.dtype,
    layout: Layout,
    groups: str,
    clip: bool,
) -> list[Parameter]:
    """The same training with torch's class, on dense gradients of the parameter's dtype."""
    model = Model(declaration, dtype, layout, groups)
    kwargs = {**declaration.kwargs, "maximize": groups == "maximize", "foreach": False}
    optimizer = declaration.torchs(model.groups, **kwargs)
    for step in range(STEPS):
        for p, g in zip(model.params, model.gradients(step), strict=True):
            p.grad_dtype = p.dtype
            p.grad = torch.empty_like(p).copy_(g)
        if clip:  # torch would measure bf16 gradients in bf16
            norm = torch.tensor(total_norm([p.grad for p in model.params]), dtype=torch.float64)
            torch.nn.utils.clip_grads_with_norm_(model.params, model.max_norm, norm)
        optimizer.step()
    return model.params


def name_case(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return value.name if isinstance(value, Layout | Declaration) else str(value)


@pytest.mark.parametrize(
    ("declaration", "dtype", "layout", "groups", "chain"), CASES, ids=name_case
)
def test_step(
    declaration: Declaration,
    dtype: torch.dtype,
    layout: Layout,
    groups: str,
    chain: Chain,
) -> None:
    ours = Model(declaration, dtype, layout, groups)
    run_ours(ours, declaration, {**declaration.kwargs, "maximize": groups == "maximize"}, chain)
    if declaration.torchs is None:
        return
    clip = chain.clip != "no_clip"
    torchs = run_torch(declaration, dtype, layout, groups, clip)
    for p, q in zip(ours.params, torchs, strict=True):
        assert p.stride() == q.stride()
        assert_near(p, q, declaration.tolerance, f"after {STEPS} steps, {tuple(p.shape)} {p.dtype}")
