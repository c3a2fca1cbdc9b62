"""accum.install(): an unchanged loop acts on full windows only."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import faststep

from .common import (
    OPTIMIZERS,
    Make,
    assert_close,
    assert_equal,
    batches,
    loss_of,
    make_model,
    values,
)

over_optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
over_scalers = pytest.mark.parametrize(
    "scaler_class", [torch.amp.GradScaler, faststep.amp.GradScaler], ids=["torch's", "faststep's"]
)
DATA = batches([4] * 8)


def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def by_hand(make: Make, clip: float | None = None, data: list = DATA) -> list[Tensor]:
    model = make_model()
    optimizer = make(model.parameters())
    scheduler = halving(optimizer)
    for start in range(0, len(data), 3):
        window = data[start : start + 3]
        for batch in window:
            (loss_of(model, batch) / len(window)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("zero_first", [True, False])
@over_optimizers
def test_a_plain_loop(make: Make, zero_first: bool) -> None:
    model = make_model()
    optimizer = make(model.parameters())
    scheduler = halving(optimizer)
    accum = faststep.accumulate(optimizer, 3).install(scheduler=scheduler)
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in DATA:
            if zero_first:
                optimizer.zero_grad()
            loss_of(model, batch).backward()
            before = values(model)
            assert optimizer.step() is None
            moved = not torch.equal(before[0], values(model)[0])
            scheduler.step()
            counts.append((moved, scheduler.last_epoch))
            if not zero_first:
                optimizer.zero_grad()
        assert counts == [(n % 3 == 2, (n + 1) // 3) for n in range(8)]
        assert accum.flush()
    assert scheduler.last_epoch == 3
    assert not accum.flush()
    assert_close(values(model), by_hand(make), 1e-5)


@over_scalers
@over_optimizers
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_loop_with_a_scaler(make: Make, scaler_class: Any, clip: float | None) -> None:
    """The usual order, unscale_ and torch's clip_grad_norm_ in every micro-step included."""
    model = make_model()
    optimizer = make(model.parameters())
    scheduler, scaler = halving(optimizer), scaler_class("cpu", init_scale=256.0)
    accum = faststep.accumulate(optimizer, 3).install(scaler=scaler, scheduler=[scheduler])
    norms = []
    for batch in DATA:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    if clip is None:
        assert accum.flush()
        assert_close(values(model), by_hand(make), 1e-5)
    else:
        assert [norm > 0.0 for norm in norms] == [n % 3 == 2 for n in range(8)]
        assert_close(values(model), by_hand(make, clip, DATA[:6]), 1e-5)
        with pytest.raises(RuntimeError, match=r"flush\(\) would leave out"):
            accum.flush()
    windows = 3 if clip is None else 2
    assert scaler.get_scale() == 256.0
    assert scaler._growth_tracker.item() == windows
    assert scheduler.last_epoch == windows
    assert (accum.windows, accum.discarded) == (windows, 0)


@over_scalers
def test_overflow(scaler_class: Any) -> None:
    model = make_model()
    optimizer = faststep.optim.AdamW(model.parameters())
    scaler = scaler_class("cpu", init_scale=256.0)
    accum = faststep.accumulate(optimizer, 2).install(scaler=scaler)
    for index, batch in enumerate(DATA):
        scaler.scale(loss_of(model, batch) * (float("inf") if index == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 128.0
    assert (accum.windows, accum.discarded) == (4, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_sums(dtype: torch.dtype) -> None:
    """The same bits as with `with accum:`."""
    found = []
    for installed in (True, False):
        model = make_model(dtype)
        optimizer = faststep.optim.AdamW(model.parameters())
        accum = faststep.accumulate(optimizer, 3, dtype=torch.float32)
        if installed:
            accum.install()
        for x, y in DATA[:6]:
            if installed:
                loss_of(model, (x.to(dtype), y)).backward()
                optimizer.step()
                optimizer.zero_grad()
                continue
            with accum:
                loss_of(model, (x.to(dtype), y)).backward()
            if accum.ready:
                optimizer.step()
                optimizer.zero_grad()
        found.append(values(model))
    assert_equal(*found)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("in_pairs", [None, False, True])
def test_what_is_cleared_before_a_window_is_no_part_of_it(
    in_pairs: bool | None, set_to_none: bool
) -> None:
    """As after a pass to warm up; with and without fp32 sums, before the first and the second."""
    sums = {} if in_pairs is None else {"dtype": torch.float32, "in_pairs": in_pairs}
    params = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(2)]
    both = [faststep.optim.SGD([param], lr=1.0) for param in params]
    accum = faststep.accumulate(both, 2, normalize="sum", **sums).install()
    for window in range(2):
        (params[0] * 3.0 + params[1] * 5.0).sum().backward()
        both[0].zero_grad(set_to_none=set_to_none)
        for _ in range(2):
            (params[0] + params[1]).sum().backward()
            for optimizer in both:
                optimizer.step()
            for optimizer in both:
                optimizer.zero_grad(set_to_none=set_to_none)
        assert params[0].tolist() == [-2.0 * (window + 1)] * 2
        assert params[1].tolist() == [-7.0 * (window + 1)] * 2
    assert accum.windows == 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_is_cleared_before_a_window_and_not_used_in_it(set_to_none: bool) -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = faststep.optim.SGD(params, lr=1.0)
    accum = faststep.accumulate(optimizer, 2).install()
    (params[0] * 3.0).sum().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    for _ in range(2):
        params[1].sum().backward()
        optimizer.step()
    assert accum.windows == 1
    assert [param.tolist() for param in params] == [[0.0, 0.0], [-1.0, -1.0]]


def test_tokens() -> None:
    found = []
    for installed in (True, False):
        model = make_model()
        optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
        accum = faststep.accumulate(optimizer, 2, normalize="tokens")
        if installed:
            accum.install()
        for index, batch in enumerate(DATA):
            tokens = 0 if index in (2, 3) else 4
            with accum if not installed else torch.enable_grad():
                accum.add_count(tokens)
                accum.backward(loss_of(model, batch, "sum") * (tokens / 4))
            if installed or accum.ready:
                optimizer.step()
                optimizer.zero_grad()
        assert (accum.windows, accum.empty, accum.discarded) == (4, 1, 0)
        found.append(values(model))
    assert_equal(*found)


def test_closures() -> None:
    """The closure is called in every micro-step, and its loss returned."""
    model, reference = make_model(), make_model()
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
    faststep.accumulate(optimizer, 2).install()
    losses = []
    for batch in DATA[:4]:

        def closure(batch=batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure))
    assert len(losses) == 4
    assert all(isinstance(loss, Tensor) for loss in losses)
    optimizer = faststep.optim.SGD(reference.parameters(), lr=0.1)
    for start in (0, 2):
        for batch in DATA[start : start + 2]:
            (loss_of(reference, batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(values(model), values(reference))


def test_several_optimizers() -> None:
    model, reference = make_model(), make_model()
    both = [
        [faststep.optim.AdamW(m[:2].parameters()), torch.optim.SGD(m[2:].parameters(), lr=0.1)]
        for m in (model, reference)
    ]
    faststep.accumulate(both[0], 4).install()
    for index, batch in enumerate(DATA):
        loss_of(model, batch).backward()
        (loss_of(reference, batch) / 4).backward()
        for optimizer in both[0]:
            optimizer.step()
            optimizer.zero_grad()
        if index % 4 == 3:
            for optimizer in both[1]:
                optimizer.step()
                optimizer.zero_grad()
    assert_equal(values(model), values(reference))


def test_a_scheduler_made_after_install() -> None:
    model = make_model()
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
    accum = faststep.accumulate(optimizer, 2).install()
    halving(optimizer)
    before = values(model)
    loss_of(model, DATA[0]).backward()
    optimizer.step()
    assert_equal(values(model), before)
    accum.remove()
    loss_of(model, DATA[0]).backward()
    optimizer.step()
    assert not torch.equal(values(model)[0], before[0])
