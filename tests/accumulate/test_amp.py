"""Loss scaling and clipping of whole windows, against plain torch."""

import math

import pytest
import torch
from torch import Tensor, nn

import faststep

from .common import (
    OPTIMIZERS,
    Make,
    assert_close,
    assert_equal,
    batches,
    grads,
    loss_of,
    make_model,
    micro_steps,
    values,
)

over_optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
over_scalers = pytest.mark.parametrize(
    "scaler_class", [torch.amp.GradScaler, faststep.amp.GradScaler], ids=["torch's", "faststep's"]
)
WINDOWS = [batches([4] * 3, seed) for seed in range(4)]


def by_hand(make: Make, clip: float | None, overflow: int | None = None) -> list[list[Tensor]]:
    """torch's recipe: loss / N, and everything once per window."""
    model = make_model()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    history = []
    for number, window in enumerate(WINDOWS):
        for batch in window:
            loss = loss_of(model, batch) / len(window)
            scaler.scale(loss * (math.inf if number == overflow else 1.0)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        history.append(values(model))
    return history


@over_scalers
@over_optimizers
def test_one_unscale_per_window(make: Make, scaler_class) -> None:
    """With an overflow in the second window, which is dropped and counted."""
    expected = by_hand(make, None, overflow=1)
    model = make_model()
    optimizer = make(model.parameters())
    scaler = scaler_class("cpu", init_scale=1024.0)
    accum = faststep.accumulate(optimizer, 3)
    for number, window in enumerate(WINDOWS):
        for batch in window:
            with accum:
                loss = loss_of(model, batch) * (math.inf if number == 1 else 1.0)
                scaler.scale(loss).backward()
        assert accum.ready
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert_close(values(model), expected[number], 1e-5)
    assert not vars(optimizer).keys() & {"grad_scale", "found_inf"}
    assert not accum.flush()
    assert (accum.windows, accum.discarded) == (4, 1)
    assert scaler.get_scale() == 512.0


def _unscale_then_clip(scaler, optimizer, params) -> None:
    """faststep's unscale_ divides in its own pass, so any clipping after it is right."""
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(params, 0.1)
    scaler.step(optimizer)


def _clip_in_the_step(scaler, optimizer, params) -> None:
    scaler.step(optimizer, max_norm=0.1)


def _unscale_alone(scaler, optimizer, params) -> None:
    """The division is still left to the step."""
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


CHAINS = [
    pytest.param(clip, chain, cls, enabled, id=f"{name}, {chain.__name__}, {enabled}")
    for clip, chain, cls, name, enabled in (
        (0.1, _unscale_then_clip, faststep.amp.GradScaler, "faststep's", True),
        (0.1, _clip_in_the_step, faststep.amp.GradScaler, "faststep's", True),
        (0.1, _clip_in_the_step, faststep.amp.GradScaler, "faststep's", False),
        (None, _unscale_alone, torch.amp.GradScaler, "torch's", True),
    )
]


@pytest.mark.parametrize(("clip", "chain", "scaler_class", "enabled"), CHAINS)
@over_optimizers
def test_chains_of_a_scaler(make: Make, clip: float | None, chain, scaler_class, enabled) -> None:
    expected = by_hand(make, clip)
    model = make_model()
    optimizer = make(model.parameters())
    scaler = scaler_class("cpu", init_scale=1024.0, enabled=enabled)
    accum = faststep.accumulate(optimizer, 3)
    for window, after in zip(WINDOWS, expected, strict=True):
        micro_steps(accum, model, window, scaler)
        chain(scaler, optimizer, model.parameters())
        scaler.update()
        optimizer.zero_grad()
        assert_close(values(model), after, 1e-5)


def test_clipping_after_torchs_unscale_is_refused() -> None:
    model = make_model()
    optimizer = faststep.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accum = faststep.accumulate(optimizer, 3)
    micro_steps(accum, model, WINDOWS[0], scaler)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="normalize_"):
        scaler.step(optimizer)


@pytest.mark.parametrize("way", ["accum", "faststep", "normalize_", "max_grad_norm"])
@over_optimizers
def test_clip_without_a_scaler(make: Make, way: str) -> None:
    """The norm is that of the mean, and so is what is clipped."""
    expected = by_hand(make, 0.1)
    model = make_model()
    optimizer = make(model.parameters())
    if way == "max_grad_norm":
        if not isinstance(optimizer, faststep.optim.base.FusedOptimizer):
            pytest.skip("an option of faststep's optimizers")
        optimizer.max_grad_norm = 0.1
    accum = faststep.accumulate(optimizer, 3)
    for window, after in zip(WINDOWS, expected, strict=True):
        reference = [0.0] * len(list(model.parameters()))
        micro_steps(accum, model, window)
        divided = [grad.double() for grad in grads(model)]
        if accum._window.optimizers[0] in faststep.grads.divide._waiting:
            divided = [grad / 3 for grad in divided]
        reference = math.sqrt(sum(float((grad**2).sum()) for grad in divided))
        norm = reference
        if way == "accum":
            norm = accum.clip_grad_norm_(0.1)
        elif way == "faststep":
            norm = faststep.clip_grad_norm_(model.parameters(), 0.1)
        elif way == "normalize_":
            accum.normalize_()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert float(norm) == pytest.approx(reference, rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        assert_close(values(model), after, 1e-5)


@over_optimizers
def test_a_norm_that_is_measured_first(make: Make) -> None:
    """get_total_norm takes gradients, not parameters, and must not give the norm of the sum."""
    model, reference = make_model(), make_model()
    optimizer, plain = make(model.parameters()), make(reference.parameters())
    accum = faststep.accumulate(optimizer, 3)
    for batch in WINDOWS[0]:
        with accum:
            accum.backward(loss_of(model, batch))
        (loss_of(reference, batch) / 3).backward()
    norms = []
    for one in (model, reference):
        params = list(one.parameters())
        norms.append(faststep.get_total_norm([p.grad for p in params]))
        faststep.clip_grads_with_norm_(params, 0.1, norms[-1])
    optimizer.step()
    plain.step()
    assert_close(norms[:1], norms[1:], 1e-6)
    assert_close(values(model), values(reference), 1e-6)


@pytest.mark.parametrize("in_a_hook", [False, True])
@pytest.mark.parametrize("make", [OPTIMIZERS["faststep AdamW"], OPTIMIZERS["torch fused AdamW"]])
def test_torchs_clipping_of_a_sum_is_refused(make: Make, in_a_hook: bool) -> None:
    """It would clip the sum over the window, not its mean: step() says so and changes nothing.

    Also in a hook before the step that was registered after accumulate().
    """
    model = make_model()
    optimizer = make(model.parameters())
    accum = faststep.accumulate(optimizer, 3)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    if in_a_hook:
        optimizer.register_step_pre_hook(clip)
    micro_steps(accum, model, WINDOWS[0])
    before = values(model)
    if not in_a_hook:
        clip()
    with pytest.raises(RuntimeError, match=r"clipping.*a sum that step\(\) divides by 3.*max_grad"):
        optimizer.step()
    assert_close(values(model), before, 0.0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_clipping_a_norm_that_is_not_finite(value: float) -> None:
    """As torch: an infinite norm makes finite gradients 0, NaN makes all NaN."""
    param = nn.Parameter(torch.zeros(2))
    optimizer = faststep.optim.SGD([param], lr=1.0)
    accum = faststep.accumulate(optimizer, 2)
    for factor in (torch.tensor([1.0, value]), torch.ones(2)):
        with accum:
            accum.backward((param * factor).sum())
    with pytest.raises(RuntimeError, match="non-finite"):
        accum.clip_grad_norm_(1.0, error_if_nonfinite=True)
    accum.clip_grad_norm_(1.0)
    optimizer.step()
    expected = [0.0, math.nan] if math.isinf(value) else [math.nan, math.nan]
    assert torch.equal(param.detach().isnan(), torch.tensor(expected).isnan())


def test_clipping_a_norm_that_its_dtype_cannot_hold() -> None:
    param = nn.Parameter(torch.zeros(1000, dtype=torch.float16))
    optimizer = faststep.optim.SGD([param], lr=1.0)
    accum = faststep.accumulate(optimizer, 1)
    with accum:
        accum.backward((param * 6e4).sum())
    with pytest.raises(RuntimeError, match="non-finite"):
        accum.clip_grad_norm_(1.0, error_if_nonfinite=True)
    norm = accum.clip_grad_norm_(1.0)
    assert norm == math.inf
    assert norm.dtype == torch.float16


def test_fp16_with_sums_can_be_unscaled() -> None:
    """torch refuses to unscale fp16 gradients; the fp32 sums are none."""
    model = make_model(torch.float16)
    optimizer = faststep.optim.AdamW(model.parameters())
    scaler = faststep.amp.GradScaler("cpu", init_scale=1024.0)
    accum = faststep.accumulate(optimizer, 3, dtype=torch.float32)
    micro_steps(accum, model, batches([4] * 3, 0, torch.float16), scaler)
    scaled = grads(model)
    scaler.unscale_(optimizer)
    assert_close(grads(model), [grad / 3072 for grad in scaled], 1e-6)
    scaler.step(optimizer)
    scaler.update()
    assert not optimizer.step_was_skipped


@over_scalers
def test_another_step_of_the_same_window(scaler_class) -> None:
    """What is in `.grad` is still scaled, by a scale that may have changed since."""
    model = make_model()
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=100.0)
    scaler = scaler_class("cpu", init_scale=1024.0)
    accum = faststep.accumulate(optimizer, 3)
    micro_steps(accum, model, WINDOWS[0], scaler)
    scaler.step(optimizer)
    scaler.update()
    before = values(model)
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\) after the step"):
        scaler.step(optimizer)
    assert_equal(values(model), before)
