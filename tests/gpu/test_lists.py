"""Clipping and norms: the bits of the CPU backend, and the values of torch's CUDA kernels."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import faststep
from faststep import _C
from optim.common import DTYPES, dtype_name

from .common import CUDA, SPECIAL, Twins, no_synchronization, place, same_bits, values

NORMS = (2.0, 1.0, math.inf, -math.inf, 3.0, 0.0)
EXACT = NORMS[:4]


def twins_of(*grads: torch.Tensor) -> Twins:
    twins = Twins([torch.zeros_like(g) for g in grads])
    twins.set_grads(grads)
    return twins


def assert_same_grads(twins: Twins) -> None:
    for p, q in zip(twins.cpu, twins.cuda, strict=True):
        assert same_bits(p.grad, q.grad.cpu())


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_clip_grad_norm(dtype: torch.dtype, norm_type: float) -> None:
    twins = twins_of(*(values((n,), n, dtype) for n in (3, 20_001, 1, 255)))
    expected = faststep.clip_grad_norm_(twins.cpu, 0.25, norm_type)
    if norm_type == 0.0:  # torch's own, which waits
        norm = faststep.clip_grad_norm_(twins.cuda, 0.25, norm_type)
    else:
        with no_synchronization():
            norm = faststep.clip_grad_norm_(twins.cuda, 0.25, norm_type)
    assert norm.device == CUDA
    if norm_type in EXACT:
        assert same_bits(norm.cpu(), expected)
        assert_same_grads(twins)
        return
    torch.testing.assert_close(norm.cpu(), expected)
    for p, q in zip(twins.cpu, twins.cuda, strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad)


@pytest.mark.parametrize("bad", SPECIAL)
def test_special_values(bad: float) -> None:
    grad = values((3000,), 0)
    grad[7] = bad
    twins = twins_of(grad, values((5,), 1))
    norms = [faststep.clip_grad_norm_(p, 0.25) for p in (twins.cpu, twins.cuda)]
    assert same_bits(norms[0], norms[1].cpu())
    assert_same_grads(twins)


def test_mixed_dtypes_and_layouts() -> None:
    grads = [values((6, 4), 0).t(), values((300,), 2)[::3], *(values((9,), 1, d) for d in DTYPES)]
    twins = twins_of(*grads)
    norms = [faststep.clip_grad_norm_(p, 0.25) for p in (twins.cpu, twins.cuda)]
    assert same_bits(norms[0], norms[1].cpu())
    assert_same_grads(twins)


def test_error_if_nonfinite() -> None:
    twins = twins_of(torch.tensor([1.0, math.inf]))
    with pytest.raises(RuntimeError, match=r"total norm of order 2.0 .* is non-finite"):
        faststep.clip_grad_norm_(twins.cuda, 1.0, error_if_nonfinite=True)
    assert_same_grads(twins)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_get_total_norm_and_clip_with_it(dtype: torch.dtype) -> None:
    twins = twins_of(values((300,), 0, dtype), values((3,), 1, torch.float32))
    for params in (twins.cpu, twins.cuda):
        norm = faststep.get_total_norm([p.grad for p in params])
        faststep.clip_grads_with_norm_(params, 0.5, norm)
    assert_same_grads(twins)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_clip_grad_value(dtype: torch.dtype) -> None:
    twins = twins_of(values((20_001,), 0, dtype), torch.tensor(SPECIAL).to(dtype))
    faststep.clip_grad_value_(twins.cpu, 0.3)
    with no_synchronization():
        faststep.clip_grad_value_(twins.cuda, 0.3)
    assert_same_grads(twins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=dtype_name)
def test_unscale(dtype: torch.dtype) -> None:
    twins = Twins([values((n,), n, dtype) for n in (3, 20_001)])
    both = twins.optimizers(faststep.optim.SGD, lr=0.1)
    for bad in (False, True):
        pair = [faststep.amp.GradScaler(d, init_scale=3.0) for d in ("cpu", "cuda")]
        twins.draw_grads(1)
        for optimizer, scaler, params in zip(both, pair, (twins.cpu, twins.cuda), strict=True):
            if bad:
                params[1].grad[20_000] = float("nan")
            scaler.scale(torch.zeros((), device=params[0].device))
            scaler.unscale_(optimizer)
        assert_same_grads(twins)
        flags = [
            next(iter(s._per_optimizer_states[id(o)]["found_inf_per_device"].values()))
            for s, o in zip(pair, both, strict=True)
        ]
        assert bool(flags[0].item()) is bool(flags[1].item()) is bad


def assert_same_sums(
    dtype: torch.dtype, factor: float, start: bool, terms: list[Tensor], more: list[Tensor]
) -> None:
    """In one launch, which nobody waits for."""
    sums = [values(tuple(t.shape), 7, dtype) for t in terms]
    moved, *others = ([place(t, CUDA) for t in some] for some in (sums, terms, more))
    launches = _C.device_counts()[0]
    with no_synchronization():
        _C.device_accumulate(moved, others[0], factor, start, others[1] or None)
    assert _C.device_counts()[0] == launches + 1
    _C.accumulate(sums, terms, factor, start, more or None)
    for index, (ours, theirs) in enumerate(zip(moved, sums, strict=True)):
        assert same_bits(ours.cpu(), theirs), index


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_sums(dtype: torch.dtype, factor: float, start: bool) -> None:
    """All types into each type; chunks that end anywhere; special values."""
    terms = [values((n,), n, d) for n in (20_000, 255, 3, 1) for d in DTYPES]
    terms[0][: len(SPECIAL)] = torch.tensor(SPECIAL)
    assert_same_sums(dtype, factor, start, terms, [])


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_sums_of_two_terms(dtype: torch.dtype, start: bool) -> None:
    """Of every two types into each type."""
    kinds = [(n, *both) for n in (20_000, 3) for both in itertools.product(DTYPES, DTYPES)]
    terms = [values((n,), n, d) for n, d, _ in kinds]
    more = [values((n,), n + 1, d) for n, _, d in kinds]
    assert_same_sums(dtype, 0.3, start, terms, more)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_unscaling_without_a_flag(dtype: torch.dtype) -> None:
    """By 1 nothing is written; by other numbers it is as with a flag."""
    tensor = values((20_001,), 1, dtype)
    tensor[:2] = torch.tensor([math.inf, -0.0], dtype=dtype)
    for factor in (1.0, 0.5):
        there = place(tensor, CUDA)
        _C.device_unscale([there], place(torch.tensor(factor), CUDA), None, True)
        assert same_bits(there.cpu(), tensor * factor)


def test_a_list_that_names_a_tensor_twice() -> None:
    """It is unscaled twice, and an infinity that only the first of the passes meets is kept."""
    for bad in (0.0, math.inf):
        grads = [values((20_000,), 1), values((300,), 2)]
        grads[0][7] = bad
        once, twice = (place(grad, CUDA) for grad in grads)
        found = place(torch.zeros(()), CUDA)
        _C.device_unscale([once, twice, twice], place(torch.tensor(0.5), CUDA), found, True)
        assert bool(found.cpu()) is (bad != 0.0)
        assert same_bits(once.cpu(), grads[0] * 0.5)
        assert same_bits(twice.cpu(), grads[1] * 0.25)
