"""Bits: what the kernels compute is what the CPU backend computes."""

import itertools
from typing import Any

import pytest
import torch

import faststep
from combinations import of_three
from optim.common import DTYPES, dtype_name, generator
from optim.declarations import ALL, OTHERS, Declaration
from optim.layouts import LAYOUTS, Layout

from .common import REHEARSAL, SPECIAL, Twins, assert_same_scales, same_bits, scalers, values

SCALE = 16.0
SHAPES = ((3, 5), (257,), (1,), (), (0, 4), (40, 50))
CHAINS = ("plain", "clipped", "scaled", "scaled and clipped")
LARGE = 300_003 if REHEARSAL else 30_000_003
# What every optimizer shares with the first ones is not taken again for the others.
SHARED = ("plain", "tensor_lr", "betas_zero", "rho_zero")
SETTINGS = [
    pytest.param(d, kwargs, id=f"{d.name}-{name}")
    for d in ALL + OTHERS
    for name, kwargs in {"usual": d.kwargs, "other": d.other, **d.variants}.items()
    if d in ALL or name not in SHARED
]
# A scaled step without clipping writes gradients back; one that is expanded cannot be written.
EVERY = [
    case
    for case in itertools.product(ALL, DTYPES, LAYOUTS, CHAINS, (False, True))
    if case[2].written_back or case[3] != "scaled"
]


def name_case(value: Any) -> str:
    if isinstance(value, bool):
        return "maximize" if value else "minimize"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return value if isinstance(value, str) else str(value.name)


@pytest.mark.parametrize(
    ("declaration", "dtype", "layout", "chain", "maximize"),
    of_three(EVERY) if REHEARSAL else EVERY,  # the simulator is slow
    ids=name_case,
)
def test_every_dtype_layout_and_chain(
    declaration: Declaration, dtype: torch.dtype, layout: Layout, chain: str, maximize: bool
) -> None:
    twins = Twins(layout.values(dtype, generator(1)))
    kwargs: dict[str, Any] = {**declaration.kwargs, "maximize": maximize}
    if chain.endswith("clipped"):
        kwargs["max_grad_norm"] = 0.7
    both = twins.optimizers(declaration.ours, **kwargs)
    scaled = chain.startswith("scaled")
    for optimizer in both if scaled else ():
        optimizer._step_supports_amp_scaling = True  # as fused=True does; else fp16 is refused
    pair = scalers(init_scale=SCALE, growth_interval=1000) if scaled else (None, None)
    for step in range(2):
        source = generator(100 + step)
        grads = [layout.gradient(p, layout.grad_dtype or dtype, source) for p in twins.cpu]
        twins.set_grads(grads, SCALE if scaled else 1.0)
        for optimizer, scaler in zip(both, pair, strict=True):
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        twins.assert_same(*both, grads=True)
    if scaled:
        assert_same_scales(*pair)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("declaration", OTHERS, ids=lambda d: d.name)
def test_every_dtype_of_the_others(declaration: Declaration, dtype: torch.dtype) -> None:
    twins = Twins([values(s, i, dtype) for i, s in enumerate(SHAPES)])
    both = twins.optimizers(declaration.ours, **declaration.kwargs, max_grad_norm=0.7)
    twins.train(both, 2)


@pytest.mark.parametrize(("declaration", "kwargs"), SETTINGS)
def test_every_setting(declaration: Declaration, kwargs: dict[str, Any]) -> None:
    twins = Twins([values(s, i) for i, s in enumerate(SHAPES)])
    twins.train(twins.optimizers(declaration.ours, **kwargs), 4)


@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
def test_mixed_dtypes_and_groups_in_one_step(declaration: Declaration, keep_grads: bool) -> None:
    twins = Twins([values((33,), i, dtype) for i, dtype in enumerate((*DTYPES, torch.float32))])
    options = {**declaration.kwargs, "max_grad_norm": 1.0, "keep_grads": keep_grads}
    a, b = (
        declaration.ours([{"params": ps[:3]}, {"params": ps[3:], **declaration.other}], **options)
        for ps in (twins.cpu, twins.cuda)
    )
    for step in range(3):
        twins.draw_grads(step)
        a.step()
        b.step()
        twins.assert_same(a, b, grads=True)
        assert b.last_grad_norm.is_cuda
        assert same_bits(a.last_grad_norm, b.last_grad_norm.cpu())


@pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
def test_special_values(declaration: Declaration) -> None:
    twins = Twins([torch.tensor(SPECIAL), torch.tensor(SPECIAL).flip(0)])
    both = twins.optimizers(declaration.ours, **declaration.kwargs)
    for _ in range(2):
        twins.set_grads([torch.tensor(SPECIAL).roll(3), torch.tensor(SPECIAL)])
        for optimizer in both:
            optimizer.step()
        twins.assert_same(*both)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_large_and_many_tensors(dtype: torch.dtype) -> None:
    many = 40 if REHEARSAL else 5000
    shapes = [(LARGE,), *[(1024,)] * many, (LARGE // 3,)]
    twins = Twins([values(s, i, dtype, 0.1) for i, s in enumerate(shapes)])
    twins.train(twins.optimizers(faststep.optim.AdamW, max_grad_norm=1.0), 2)


def test_every_run_gives_the_same_bits() -> None:
    ends = []
    for _ in range(5):
        twins = Twins([values((LARGE // 4,), 0), values((7,), 1)])
        optimizer = faststep.optim.AdamW(twins.cuda, max_grad_norm=1.0)
        twins.draw_grads(0)
        for _ in range(3):
            optimizer.step()
        ends.append([p.cpu() for p in twins.cuda])
    for end in ends[1:]:
        assert all(same_bits(p, q) for p, q in zip(ends[0], end, strict=True))


def test_unaligned_and_odd_sizes() -> None:
    """Vector loads need 16 bytes of alignment; every start and every tail must do without."""
    for dtype in DTYPES:
        tensors = [
            values((size + 9,), size, dtype)[start : start + size]
            for start in range(9)
            for size in (1, 7, 255, 256, 257, 4099)
        ]
        twins = Twins(tensors)
        both = twins.optimizers(faststep.optim.AdamW, max_grad_norm=1.0, keep_grads=True)
        twins.train(both, 2, grads=True)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion", "NAdam"])
@pytest.mark.parametrize("clips", [True, False])
def test_gradients_that_lie_in_a_bucket(kind: str, clips: bool) -> None:
    """As with `gradient_as_bucket_view`: behind a head of 10 classes, beside aligned parameters."""
    sizes = (3, 2048, 16384 + 4096, 70001)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        twins = Twins([values((size,), size, dtype) for size in sizes])
        options = {"max_grad_norm": 1.0} if clips else {}
        both = twins.optimizers(getattr(faststep.optim, kind), lr=1e-2, **options)
        for step in range(2):
            bucket = values((10 + sum(sizes),), step, dtype)
            twins.set_grads(bucket[10:].split(sizes))
            for optimizer in both:
                optimizer.step()
            twins.assert_same(*both)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_roots_of_every_mantissa(eps: float) -> None:
    """The kernels compute roots and quotients by instructions of their own, from the hardware's
    approximations, which no simulator has: with an eps by those of a descent. With alpha=1 the
    state stays what it is set to, and a step from 0 shows every bit of the quotient."""
    count = 1 << (16 if REHEARSAL else 24)
    first, stride = 127 << 23, (1 << 24) // count  # from 1.0 on, two exponents
    bits = torch.arange(first, first + (1 << 24), stride, dtype=torch.int32)
    twins = Twins([torch.zeros(count)])
    a, b = twins.optimizers(faststep.optim.RMSprop, lr=1.0, alpha=1.0, eps=eps)
    twins.set_grads([values((count,), 1)])
    a.step(), b.step()
    # The last exponents are left to sqrtf.
    for step_number, exponents in enumerate((0, 50 << 23, -(50 << 23), -(110 << 23))):
        for optimizer in (a, b):
            (state,) = optimizer.state.values()
            state["square_avg"].copy_((bits + exponents).view(torch.float32))
            optimizer.param_groups[0]["params"][0].data.zero_()
        twins.set_grads([values((count,), 2 + step_number)])
        a.step(), b.step()
        twins.assert_same(a, b)
