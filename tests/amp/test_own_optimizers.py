"""faststep's optimizers under our scaler, and under torch's."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_

import faststep.amp.grad_scaler
import faststep.amp.unscale
import faststep.optim as fast
from compare import assert_same_tensors
from faststep.amp import GradScaler
from gradients import exact_norm
from scalers import (
    TORCHS_OPTIMIZERS,
    Doubtful,
    Make,
    Training,
    make_param,
    make_scaler,
    plain_step,
)

INF = math.inf
TORCHS = torch.amp.GradScaler


def as_fused(optimizer: Any) -> Any:
    """What `fused=True` does in the other classes: torch's scaler leaves gradients to the step."""
    optimizer._step_supports_amp_scaling = True
    return optimizer


PAIRS: dict[str, tuple[Make, Make]] = {
    "AdamW": (
        lambda ps: fast.AdamW(ps, lr=0.1, weight_decay=0.2, fused=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.2, fused=True),
    ),
    "Adam": (
        lambda ps: fast.Adam(ps, lr=0.1, amsgrad=True, fused=True),
        lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True, fused=True),
    ),
    "SGD": (
        lambda ps: fast.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, fused=True),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    ),
    "SGD without momentum": (
        lambda ps: fast.SGD(ps, lr=0.1, fused=True),
        lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    ),
}
OURS: dict[str, Make] = {name: pair[0] for name, pair in PAIRS.items()}
OURS["Lion"] = lambda ps: as_fused(fast.Lion(ps, lr=0.1))
OF_EACH_KIND = pytest.mark.parametrize("make", OURS.values(), ids=OURS)
OF_ANY = pytest.mark.parametrize(  # torch's scaler goes wrong here with torch's fused classes
    ("cls", "make"),
    [(GradScaler, make) for make in (OURS | TORCHS_OPTIMIZERS).values()]
    + [(TORCHS, make) for make in OURS.values()],
    ids=[*(OURS | TORCHS_OPTIMIZERS), *(f"{name}, torch's scaler" for name in OURS)],
)
AGAINST_TORCHS = pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS)
SCALERS = pytest.mark.parametrize("cls", [GradScaler, TORCHS], ids=["our scaler", "torch's scaler"])


def params_of(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [p for g in optimizer.param_groups for p in g["params"]]


def clip_then_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    torch_clip_grad_norm_(params_of(optimizer), 0.5)
    scaler.step(optimizer)


def clip_in_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer, max_norm=0.5)


def unscale_then_clip_in_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer, max_norm=0.5)


def without_gradients(training: Training, history: list[Tensor]) -> list[Tensor]:
    """A history of Training.run without the gradients, which clipping inside the step leaves."""
    count = len(training.params)
    kept, at = [], 0
    for _ in training.grads:
        kept += [*history[at : at + count], history[at + 2 * count]]
        at += 2 * count + 1
    return kept + history[at:]


@SCALERS
@AGAINST_TORCHS
@pytest.mark.parametrize("body", [plain_step, clip_then_step])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_is_that_of_torchs_fused_optimizer_and_scaler(
    cls: type[Any], ours: Make, theirs: Make, body: Callable[..., Any], dtype: torch.dtype
) -> None:
    mine = Training(cls, ours, dtype).run(body)
    torch.testing.assert_close(mine, Training(TORCHS, theirs, dtype).run(body), equal_nan=True)


@OF_EACH_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_scalers_give_the_same_bits(make: Make, dtype: torch.dtype) -> None:
    mine = Training(GradScaler, make, dtype).run(plain_step)
    assert_same_tensors(mine, Training(TORCHS, make, dtype).run(plain_step))


@AGAINST_TORCHS
@pytest.mark.parametrize("body", [clip_in_step, unscale_then_clip_in_step])
def test_max_norm_is_unscale_clip_step(ours: Make, theirs: Make, body: Callable[..., Any]) -> None:
    training = Training(GradScaler, ours)
    mine = without_gradients(training, training.run(body))
    expected = without_gradients(training, Training(TORCHS, theirs).run(clip_then_step))
    torch.testing.assert_close(mine, expected)


@OF_EACH_KIND
@pytest.mark.parametrize("max_norm", [None, 0.5, 1e9])
def test_the_norm_is_that_of_the_unscaled_gradients(make: Make, max_norm: float | None) -> None:
    grads = [torch.randn(1000), torch.randn(3, 5)]
    params = [Parameter(torch.randn_like(g)) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad * 8.0
    optimizer = make(params)
    make_scaler().step(optimizer, max_norm=max_norm)
    assert float(optimizer.last_grad_norm) == pytest.approx(exact_norm(grads, 2.0), rel=1e-6)


@OF_EACH_KIND
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_the_scaler_makes_no_pass_of_its_own(
    make: Make, max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faststep.amp.unscale, "_C", None)
    monkeypatch.setattr(faststep.amp.grad_scaler, "clip_grad_norm_", None)
    param = make_param(1.0, grad=[8.0])
    scaler = make_scaler()
    scaler.step(make([param]), max_norm=max_norm)
    scaler.update()
    assert param != 1.0


@AGAINST_TORCHS
def test_without_gradients_update_complains_as_with_torchs_fused(ours: Make, theirs: Make) -> None:
    for cls, make in ((GradScaler, ours), (TORCHS, ours), (TORCHS, theirs)):
        scaler, optimizer = make_scaler(cls), make([make_param(1.0)])
        assert scaler.step(optimizer) is None
        assert "found_inf" not in vars(optimizer)
        with pytest.raises(AssertionError, match=r"No inf checks were recorded prior to update\."):
            scaler.update()
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
            scaler.step(optimizer)


@OF_ANY
def test_gradients_that_came_after_unscale_are_an_error(make: Make, cls: type[Any]) -> None:
    """unscale_ before backward: the gradients still have the scale, and nobody looked at them."""
    param = make_param(1.0)
    scaler, optimizer = make_scaler(cls), make([param])
    scaler.unscale_(optimizer)
    param.grad = torch.tensor([8.0])
    with pytest.raises(AssertionError, match=r"No inf checks were recorded for this optimizer\."):
        scaler.step(optimizer)
    assert param.item() == 1.0
    assert not optimizer.state


@OF_EACH_KIND
@pytest.mark.parametrize("bad", [False, True])
def test_gradients_of_a_closure_are_checked(make: Make, bad: bool) -> None:
    param = make_param(1.0)
    scaler, optimizer = make_scaler(), make([param])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param * (INF if bad else 3.0)).sum()
        scaler.scale(loss).backward()
        return loss.detach()

    loss = scaler.step(optimizer, closure)
    scaler.update()
    assert loss == (INF if bad else 3.0)
    assert optimizer.step_was_skipped is bad
    assert (param.item() == 1.0) is bad
    assert scaler.get_scale() == (4.0 if bad else 8.0)


@OF_EACH_KIND
def test_an_error_in_step_leaves_nothing_behind(make: Make) -> None:
    param = make_param(1.0, 2.0)
    param.grad = torch.ones(2).to_sparse()
    scaler, optimizer = make_scaler(), make([param])
    before = set(vars(optimizer)) | {"_stepper"}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="sparse"):
            scaler.step(optimizer, max_norm=1.0)
        assert set(vars(optimizer)) <= before
    assert param.tolist() == [1.0, 2.0]
    param.grad = torch.tensor([8.0, 8.0])
    scaler.step(optimizer, max_norm=1.0)
    assert param.tolist() != [1.0, 2.0]


@OF_EACH_KIND
def test_a_step_that_was_replaced_on_the_instance_is_the_one_called(make: Make) -> None:
    param = make_param(1.0, grad=[INF])
    optimizer, scaler = make([param]), make_scaler()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    original, calls = optimizer.step, []

    def step(*args: Any, **kwargs: Any) -> Any:
        calls.append(optimizer.found_inf.item())
        result = original(*args, **kwargs)
        calls.append(optimizer.found_inf.item())
        return result

    optimizer.step = step
    scaler.step(optimizer)
    assert calls == [0.0, 1.0]


@pytest.mark.parametrize("make", (OURS | TORCHS_OPTIMIZERS).values(), ids=OURS | TORCHS_OPTIMIZERS)
def test_a_disabled_scaler_still_clips(make: Make) -> None:
    mine, other = (make_param(1.0, 1.0, grad=[3.0, 4.0]) for _ in range(2))
    GradScaler("cpu", enabled=False).step(make([mine]), max_norm=1.0)
    torch_clip_grad_norm_(other, 1.0)
    make([other]).step()
    torch.testing.assert_close(mine, other)


@OF_ANY
def test_gradients_spoiled_after_unscale_are_not_checked_again(cls: type[Any], make: Make) -> None:
    """What unscale_ saw decides, and a NaN planted later is applied."""
    param = make_param(1.0, grad=[8.0])
    scaler, optimizer = make_scaler(cls), make([param])
    scaler.unscale_(optimizer)
    param.grad.fill_(math.nan)
    scaler.step(optimizer)
    scaler.update()
    assert not getattr(optimizer, "step_was_skipped", False)
    assert math.isnan(param.item())
    assert scaler.get_scale() == 8.0


@OF_EACH_KIND
def test_a_subclass_with_a_check_of_its_own_is_asked(make: Make) -> None:
    param = make_param(1.0, grad=[8.0])
    scaler, optimizer = make_scaler(Doubtful), make([param])
    scaler.step(optimizer)
    scaler.update()
    assert param == 1.0
    assert optimizer.step_was_skipped
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("scheduled", [False, True])
def test_steps_that_nobody_watches_make_no_pass_of_their_own(
    scheduled: bool, max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the classes as they are by default, without an overflow; a scheduler may count steps."""
    param = make_param(1.0, grad=[8.0])
    scaler, optimizer = make_scaler(), fast.AdamW([param], lr=0.1)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    monkeypatch.setattr(faststep.amp.unscale, "_C", None)
    monkeypatch.setattr(faststep.amp.grad_scaler, "clip_grad_norm_", None)
    scaler.step(optimizer, max_norm=max_norm)
    scaler.update()
    assert param != 1.0
    assert param.grad == (1.0 if max_norm is None else 8.0)
    assert getattr(optimizer, "_opt_called", False) is scheduled


def test_a_mark_that_wraps_has_copied_is_no_scheduler() -> None:
    """functools.wraps around a scheduler's wrapper, and around the step of a class."""
    param = make_param(1.0, grad=[8.0])
    scaler, optimizer = make_scaler(), fast.SGD([param], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen = []

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def around(*args: Any) -> Any:
            seen.append(param.grad.item())
            return step(*args)

        return around

    optimizer.step = watched(optimizer.step)
    scaler.step(optimizer)
    scaler.update()

    class Watched(fast.SGD):
        step = watched(fast.SGD.step)

    param.grad = torch.tensor([8.0])
    scaler.step(Watched([param], lr=0.1))
    assert seen == [1.0, 1.0]


def test_a_skipped_step_is_known_whether_it_was_called_or_not() -> None:
    for hooked in (False, True):
        param = make_param(1.0, grad=[INF])
        scaler, optimizer = make_scaler(), fast.SGD([param], lr=0.1)
        if hooked:
            optimizer.register_step_post_hook(lambda *_: None)
        for bad in (True, False):
            param.grad = torch.tensor([INF if bad else 8.0])
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.step_was_skipped is bad


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
def test_an_empty_fp16_gradient_is_refused_as_others_are(scaler_class: type[Any]) -> None:
    params = [torch.ones(4), torch.ones(0, dtype=torch.float16)]
    for param in params:
        param.grad = torch.ones_like(param)
    scaler = scaler_class("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(fast.SGD(params, lr=0.1))
    assert torch.equal(params[0], torch.ones(4))
