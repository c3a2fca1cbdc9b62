"""dtype=torch.float32: fp32 sums of low-precision gradients, bit for bit those of plain torch."""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from gradients import LAYOUTS

from .common import (
    OPTIMIZERS,
    assert_close,
    assert_equal,
    batches,
    finish,
    loss_of,
    make_model,
    micro_steps,
)

LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def sums_by_hand(model: nn.Module, window: list) -> list[Tensor]:
    """`.float()` and `add_`, as people write it."""
    totals = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
    for batch in window:
        loss_of(model, batch).backward()
        for total, param in zip(totals, model.parameters(), strict=True):
            total.add_(param.grad.float())
            param.grad = None
    return totals


@LOW
def test_the_bits_of_a_hand_written_sum(dtype: torch.dtype) -> None:
    model, reference = make_model(dtype), make_model(dtype)
    optimizer = faststep.optim.AdamW(model.parameters())
    accum = faststep.accumulate(optimizer, 8, dtype=torch.float32)
    for seed in range(3):
        window = batches([4] * 8, seed, dtype)
        micro_steps(accum, model, window)
        expected = sums_by_hand(reference, window)
        assert_equal([p.grad for p in model.parameters()], expected)
        accum.normalize_()
        assert_equal([p.grad for p in model.parameters()], [total / 8 for total in expected])
        optimizer.zero_grad()


@LOW
def test_small_gradients_are_not_lost(dtype: torch.dtype) -> None:
    """256 + 1 + ... + 1: a low-precision sum stays at 256."""
    lost, kept = (nn.Parameter(torch.zeros(2, dtype=dtype)) for _ in range(2))
    for param, sum_dtype in ((lost, None), (kept, torch.float32)):
        optimizer = faststep.optim.SGD([param], lr=1.0)
        accum = faststep.accumulate(optimizer, 9, normalize="sum", dtype=sum_dtype)
        for index in range(9):
            with accum:
                accum.backward((param * (4096.0 if index == 0 else 1.0)).sum())
    assert kept.grad.tolist() == [4104.0, 4104.0]
    assert lost.grad.float().tolist() != [4104.0, 4104.0]


@LOW
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_with_every_optimizer(make, dtype: torch.dtype) -> None:
    """faststep's read the fp32 sum; others get its mean, rounded once to the parameter's dtype."""
    model, reference = make_model(dtype), make_model(dtype)
    optimizer, theirs = make(model.parameters()), make(reference.parameters())
    accum = faststep.accumulate(optimizer, 4, dtype=torch.float32)
    for seed in range(2):
        window = batches([4] * 4, seed, dtype)
        micro_steps(accum, model, window)
        for param, total in zip(
            reference.parameters(), sums_by_hand(reference, window), strict=True
        ):
            param.grad = (total / 4).to(dtype)
        finish(optimizer)
        finish(theirs)
        assert_close(
            [p.detach() for p in model.parameters()],
            [p.detach() for p in reference.parameters()],
            0.02,
        )
        if not isinstance(optimizer, faststep.optim.base.FusedOptimizer):
            assert_equal(list(model.parameters()), list(reference.parameters()))


def test_no_memory_where_parameters_are_fp32() -> None:
    """Autograd's own sums are used, and no hook is set."""
    model = make_model()
    accum = faststep.accumulate(faststep.optim.SGD(model.parameters()), 2, dtype=torch.float32)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not accum._window.sums


def test_the_low_precision_gradient_is_freed_at_once() -> None:
    model = make_model(torch.bfloat16)
    accum = faststep.accumulate(faststep.optim.SGD(model.parameters()), 2, dtype=torch.float32)
    seen = []
    for param in model.parameters():
        param.register_hook(lambda grad: seen.append(weakref.ref(grad)))
    (batch,) = batches([4], 0, torch.bfloat16)
    with accum:
        accum.backward(loss_of(model, batch))
    gc.collect()
    assert seen
    assert all(reference() is None for reference in seen)
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_buffers_are_used_again() -> None:
    model = make_model(torch.bfloat16)
    optimizer = faststep.optim.SGD(model.parameters())
    accum = faststep.accumulate(optimizer, 2, dtype=torch.float32)
    places = []
    for seed in range(3):
        micro_steps(accum, model, batches([4, 4], seed, torch.bfloat16))
        places.append([p.grad.data_ptr() for p in model.parameters()])
        finish(optimizer)
    assert places[0] == places[1] == places[2]


def test_zero_grad_in_place() -> None:
    """zero_grad(set_to_none=False) leaves the buffer in .grad: it counts as zeros."""
    sums = []
    for set_to_none in (True, False):
        model = make_model(torch.bfloat16)
        optimizer = faststep.optim.SGD(model.parameters())
        accum = faststep.accumulate(optimizer, 2, dtype=torch.float32)
        for seed in range(2):
            micro_steps(accum, model, batches([4, 4], seed, torch.bfloat16))
            sums.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert_equal(sums[0], sums[2])
    assert_equal(sums[1], sums[3])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    value = LAYOUTS[layout]()
    strided = torch.empty_strided(value.shape, value.stride(), dtype=torch.bfloat16)
    param = nn.Parameter(strided.copy_(value))
    optimizer = faststep.optim.SGD([param], lr=1.0)
    accum = faststep.accumulate(optimizer, 3, normalize="sum", dtype=torch.float32)
    factors = [torch.randn(value.shape).to(torch.bfloat16) for _ in range(3)]
    for factor in factors:
        with accum:
            accum.backward((param * factor).sum())
    assert torch.equal(param.grad, factors[0].float() + factors[1].float() + factors[2].float())


def test_two_backwards_in_one_micro_step() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    accum = faststep.accumulate(faststep.optim.SGD([param]), 2, dtype=torch.float32)
    for _ in range(2):
        with accum:
            param.sum().backward()
            (param * 2.0).sum().backward()
    assert param.grad.tolist() == [6.0] * 3


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("after_a_window", [False, True])
def test_what_is_cleared_outside_of_a_window_is_in_no_sum(
    in_pairs: bool, after_a_window: bool
) -> None:
    """Backward, zero_grad, backward: `.grad` is the second gradient, as in torch."""
    model, reference = make_model(torch.bfloat16), make_model(torch.bfloat16)
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.0)
    accum = faststep.accumulate(optimizer, 2, dtype=torch.float32, in_pairs=in_pairs)
    first, second, *window = batches([4] * 4, dtype=torch.bfloat16)
    for batch in window if after_a_window else ():
        with accum:
            loss_of(model, batch).backward()
    if after_a_window:
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model, first).backward()
    optimizer.zero_grad()
    loss_of(model, second).backward()
    loss_of(reference, second).backward()
    assert_equal(
        [p.grad for p in model.parameters()], [p.grad.float() for p in reference.parameters()]
    )


def test_parameters_added_and_unfrozen_later() -> None:
    first, frozen, late = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = faststep.optim.SGD([first, frozen], lr=0.5)
    accum = faststep.accumulate(optimizer, 2, dtype=torch.float32)
    for window in range(2):
        for _ in range(2):
            with accum:
                accum.backward((first + frozen + late).sum())
        finish(optimizer)
        if window == 0:
            frozen.requires_grad_(True)
            late.grad = None
            optimizer.add_param_group({"params": [late]})
    assert first.tolist() == [0.0, 0.0]
    assert frozen.tolist() == [0.5, 0.5]
    assert late.tolist() == [0.5, 0.5]


class Intercepting(torch.Tensor):
    """A tensor class of the user that sees every operator."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("odd", ["all alike", "one is negated", "one that C refuses"])
def test_gradients_that_come_without_hooks(odd: str, in_pairs: bool) -> None:
    """They are added at the end of a micro-step: some to sums, others start theirs."""
    params = [torch.nn.Parameter(torch.zeros(n, 3, dtype=torch.bfloat16)) for n in (1, 5, 9000)]
    optimizer = faststep.optim.SGD(params)
    accum = faststep.accumulate(optimizer, 3, dtype=torch.float32, in_pairs=in_pairs)
    expected: list[Any] = [None] * len(params)
    for step in range(3):
        with accum:
            for index, param in enumerate(params):
                if step < index:
                    continue
                grad = torch.randn(param.shape).to(torch.bfloat16)
                if odd == "one is negated" and index == 1:
                    grad = torch.randn(5, 3, dtype=torch.complex64).conj().imag
                    assert grad.is_neg()
                if odd == "one that C refuses" and index == 1:
                    grad = grad.as_subclass(Intercepting)
                param.grad = grad
                total = expected[index]
                expected[index] = grad.float() if total is None else total + grad.float()
        for param, total in zip(params, expected, strict=True):
            if in_pairs and not accum.ready:
                assert param.grad is None
                continue
            assert (param.grad is None) == (total is None)
            assert total is None or torch.equal(param.grad, total)
            assert total is None or param.grad.dtype == torch.float32
    assert accum.ready


def test_a_gradient_that_is_refused_leaves_all_sums_as_they_are() -> None:
    params = [torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16)) for _ in range(3)]
    accum = faststep.accumulate(faststep.optim.SGD(params), 2, dtype=torch.float32)
    with accum:
        for param in params:
            param.grad = torch.ones_like(param)
    sums = [param.grad for param in params]
    block = contextlib.ExitStack()
    block.enter_context(accum)
    for param in params:
        param.grad = torch.ones_like(param)
    params[1].grad = torch.ones_like(params[1]).to_sparse()
    with pytest.raises(TypeError, match="parameter 1 of group 0"):
        block.close()
    assert all(torch.equal(total, torch.ones(4, 3)) for total in sums)


def test_gradients_with_a_graph_are_refused() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    accum = faststep.accumulate(faststep.optim.SGD([param]), 2, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 of SGD.*create_graph"), accum:
        accum.backward((param**2).sum(), create_graph=True)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accum = faststep.accumulate(optimizer, 2, model=model, dtype=torch.float32)
    with pytest.raises(TypeError, match="the gradient of 'weight' is sparse"), accum:
        accum.backward(model(torch.tensor([1, 2])).sum())
