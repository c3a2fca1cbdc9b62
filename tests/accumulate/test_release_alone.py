"""What would change gradients between backward and the update, or use them too: refused."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, SequentialLR, StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.checkpoint import checkpoint

import faststep

from .common import assert_equal, batches, loss_of, make_model, values
from .test_release import MAKE

DATA = batches([4] * 4)


def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(0.5)


def around(step: Callable[..., Any]) -> Callable[..., Any]:
    """With functools.wraps, which copies the mark of a scheduler's wrapper too."""

    @functools.wraps(step)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return patched


def own(optimizer: Any, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    return optimizer.register_step_pre_hook(halve).remove


def of_all(optimizer: Any, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    return register_optimizer_step_pre_hook(halve).remove


def on_the_object(optimizer: Any, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(optimizer, "step", around(optimizer.step))
    return patch.undo


def around_a_scheduler(optimizer: Any, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    StepLR(optimizer, 2)
    return on_the_object(optimizer, patch)


def on_the_class(optimizer: Any, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(type(optimizer), "step", around(type(optimizer).step))
    return patch.undo


def on_torchs_class(optimizer: Any, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(torch.optim.AdamW, "step", around(torch.optim.AdamW.step))
    return patch.undo


WAYS = [own, of_all, on_the_object, around_a_scheduler, on_the_class, on_torchs_class]
over_ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
REFUSED = "step pre-hook|step of the script|would pass by"


@over_ways
def test_code_before_the_step_is_refused_at_once(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    optimizer = MAKE["AdamW"](model.parameters())
    undo = way(optimizer, monkeypatch)
    hooks = dict(optimizer._optimizer_step_pre_hooks)
    try:
        with pytest.raises((TypeError, RuntimeError), match=REFUSED):
            faststep.release_gradients(model, optimizer)
        assert optimizer._optimizer_step_pre_hooks == hooks
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    finally:
        undo()


@over_ways
def test_code_set_later_is_refused_before_the_next_update(
    way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after steps that C made alone. Without the code, training goes on."""
    model = make_model()
    groups = [{"params": model[:2].parameters()}, {"params": model[2:].parameters()}]
    optimizer = MAKE["AdamW"](groups)
    release = faststep.release_gradients(model, optimizer)
    for batch in DATA:
        loss_of(model, batch).backward()
        optimizer.step()
    undo = way(optimizer, monkeypatch)
    before = values(model)
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=REFUSED):
                loss_of(model, DATA[0]).backward()
            assert_equal(values(model), before)
    finally:
        undo()
    optimizer.zero_grad()
    loss_of(model, DATA[0]).backward()
    optimizer.step()
    assert not torch.equal(values(model)[0], before[0])
    release.remove()


@pytest.mark.parametrize("way", [own, of_all], ids=["own", "of_all"])
def test_a_hook_set_between_backward_and_step_is_refused_by_the_step(
    way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    optimizer = MAKE["AdamW"](model.parameters())
    release = faststep.release_gradients(model, optimizer)
    loss_of(model, DATA[0]).backward()
    undo = way(optimizer, monkeypatch)
    try:
        with pytest.raises(RuntimeError, match=r"step pre-hook .*halve"):
            optimizer.step()
    finally:
        undo()
    optimizer.step()
    release.remove()


def test_what_runs_after_the_update_and_schedulers_are_allowed() -> None:
    results = []
    for released in (False, True):
        model = make_model()
        optimizer = MAKE["AdamW"](model.parameters())
        seen: list[Tensor] = []

        def note(*_: Any, seen: list[Tensor] = seen, model: nn.Module = model) -> None:
            seen.extend(values(model))

        early = StepLR(optimizer, 2)
        optimizer.register_step_post_hook(note)
        release = faststep.release_gradients(model, optimizer) if released else None
        late = SequentialLR(
            optimizer, [ExponentialLR(optimizer, 0.9), StepLR(optimizer, 1)], milestones=[2]
        )
        everywhere = register_optimizer_step_post_hook(note)
        try:
            for batch in DATA:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                early.step()
                late.step()
        finally:
            everywhere.remove()
        assert (release is not None) == released
        results.append(seen)
    assert_equal(*results)


def one_param() -> tuple[nn.Module, list[nn.Parameter]]:
    model = nn.Linear(1, 1, bias=False)
    return model, list(model.parameters())


def test_two_releases_of_one_parameter_are_refused() -> None:
    model, params = one_param()
    first, second = (faststep.optim.SGD(params, lr=lr) for lr in (1.0, 0.1))
    release = faststep.release_gradients(model, first)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0.*of another optimizer"):
        faststep.release_gradients(model, second)
    assert len(params[0]._post_accumulate_grad_hooks) == 1
    release.remove()
    faststep.release_gradients(model, second).remove()


def test_a_parameter_that_joins_two_releases_is_refused() -> None:
    (model, params), (other, others) = one_param(), one_param()
    first, second = faststep.optim.SGD(params), faststep.optim.SGD(others)
    releases = [
        faststep.release_gradients(model, first),
        faststep.release_gradients(other, second),
    ]
    second.add_param_group({"params": params})
    before = values(model) + values(other)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 1.*of another optimizer"):
        other(torch.ones(1, 1)).sum().backward()
    assert_equal(values(model) + values(other), before)
    for release in releases:
        release.remove()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("released_steps_first", [True, False])
def test_a_step_of_another_optimizer_is_refused(order: str, released_steps_first: bool) -> None:
    """It would find no gradients, and leave its part of the update out."""
    model, params = one_param()
    made = [faststep.optim.SGD(params, lr=0.1)] if order == "before" else []
    released = faststep.optim.SGD(params, lr=1.0)
    release = faststep.release_gradients(model, released)
    made = made or [faststep.optim.AdamW(params, lr=0.1)]
    unrelated = faststep.optim.SGD(one_param()[1])
    model(torch.ones(1, 1)).sum().backward()
    if released_steps_first:
        released.step()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0.*of another optimizer"):
        made[0].step()
    unrelated.step()
    release.remove()
    made[0].step()


def test_a_scalers_step_of_another_optimizer_is_refused() -> None:
    """Where nobody sees the step, the scaler tries it by itself."""
    model, params = one_param()
    mine = nn.Parameter(torch.ones(2))
    other = faststep.optim.SGD([*params, mine], lr=0.1)
    released = faststep.optim.SGD(params, lr=1.0)
    release = faststep.release_gradients(model, released)
    scaler = faststep.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(mine.sum()).backward()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0.*of another optimizer"):
        scaler.step(other)
    assert mine.tolist() == [1.0, 1.0]
    release.remove()


@pytest.mark.parametrize("way", ["freeze", "inputs", "grad"])
def test_a_loss_that_goes_through_a_released_model(way: str) -> None:
    """The ways that docs/accumulation.md names, with the bits of the loop without a release."""
    results = []
    for released in (False, True):
        torch.manual_seed(0)
        maker, judge = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizers = [MAKE["AdamW"](m.parameters()) for m in (maker, judge)]
        releases = [
            faststep.release_gradients(m, o)
            for m, o in zip((maker, judge), optimizers, strict=True)
            if released and (way != "grad" or m is judge)
        ]
        for _ in range(3):
            noise, real = torch.randn(4, 3), torch.randn(4, 3)
            (judge(maker(noise).detach()).mean() - judge(real).mean()).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            if way == "freeze":
                judge.requires_grad_(False)
            loss = -judge(maker(noise)).mean()
            params = list(maker.parameters())
            if way == "grad":
                for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                    param.grad = grad
            else:
                loss.backward(inputs=None if way == "freeze" else params)
            judge.requires_grad_(True)
            optimizers[0].step()
            optimizers[0].zero_grad()
        assert len(releases) == (0 if not released else 1 if way == "grad" else 2)
        results.append(values(maker) + values(judge))
    assert_equal(*results)


@pytest.mark.parametrize("skipped", [True, False], ids=["skipped", "second loss"])
def test_a_second_backward_is_refused_before_it_updates(skipped: bool) -> None:
    """Of a loss after one that was skipped by hand, or of a second loss."""
    model = make_model()
    optimizer = MAKE["AdamW"](model.parameters())
    release = faststep.release_gradients(model, optimizer)
    loss_of(model, DATA[0]).backward()
    before = values(model)
    if skipped:
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="a second gradient"):
        loss_of(model, DATA[1]).backward()
    assert_equal(values(model), before)
    release.remove()


def test_a_module_in_two_checkpoints() -> None:
    """As without a release, if they are not reentrant; else refused at its second gradient."""
    results = []
    for released, reentrant in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = MAKE["AdamW"](model.parameters())
        release = faststep.release_gradients(model, optimizer) if released else None
        x = torch.ones(2, 3, requires_grad=True)
        for _ in range(2):
            x = checkpoint(model, x, use_reentrant=reentrant)
        if reentrant:
            with pytest.raises(RuntimeError, match="a second gradient"):
                x.square().sum().backward()
            continue
        x.square().sum().backward()
        optimizer.step()
        results.append(values(model))
        if release is not None:
            release.remove()
    assert_equal(*results)


def test_a_tensor_hook_changes_the_gradient_of_a_release() -> None:
    """What errors advise instead of a step pre-hook."""
    results = []
    for released in (False, True):
        model = make_model()
        optimizer = MAKE["AdamW"](model.parameters())
        if released:
            release = faststep.release_gradients(model, optimizer)
            for param in model.parameters():
                param.register_hook(lambda grad: grad * 0.5)
        else:
            optimizer.register_step_pre_hook(halve)
        for batch in DATA:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(values(model))
    assert_equal(*results)
    release.remove()
