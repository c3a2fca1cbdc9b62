"""accum.install(): what it refuses, and what remove() leaves behind."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import faststep

from .common import (
    batches,
    loss_of,
    make_model,
)

DATA = batches([4] * 8)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_clipping_in_the_loop_is_refused(dtype: torch.dtype | None) -> None:
    model = make_model(torch.float32 if dtype is None else torch.bfloat16)
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
    faststep.accumulate(optimizer, 3, dtype=dtype).install()
    x, y = DATA[0]
    loss_of(model, (x.to(model[0].weight.dtype), y)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match=r"between backward and step.*max_grad_norm="):
        optimizer.step()


def test_a_scaler_that_was_not_passed_is_refused() -> None:
    for cls in (torch.amp.GradScaler, faststep.amp.GradScaler):
        model = make_model()
        optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
        faststep.accumulate(optimizer, 3).install()
        scaler = cls("cpu", init_scale=4.0)
        scaler.scale(loss_of(model, DATA[0])).backward()
        with pytest.raises(RuntimeError, match=r"install\(scaler=\.\.\.\)"):
            scaler.step(optimizer)


def test_a_state_without_the_hidden_gradients_is_refused() -> None:
    """After unscale_ clipping finds no gradients inside a window; a state would not either."""
    model = make_model()
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
    scaler = faststep.amp.GradScaler("cpu", init_scale=4.0)
    accum = faststep.accumulate(optimizer, 3).install(scaler=scaler)
    scaler.scale(loss_of(model, DATA[0])).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"between scaler\.unscale_\(\) and scaler\.step\(\)"):
        accum.state_dict()
    scaler.step(optimizer)
    assert all(grad is not None for grad in accum.state_dict()["gradients"])


def test_a_missing_zero_grad_is_noticed() -> None:
    model = make_model()
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
    faststep.accumulate(optimizer, 2).install()
    for batch in DATA[:2]:
        loss_of(model, batch).backward()
        optimizer.step()
    loss_of(model, DATA[2]).backward()
    with pytest.raises(RuntimeError, match=r"zero_grad.* was not called"):
        optimizer.step()


def test_remove_leaves_nothing() -> None:
    model = make_model(torch.bfloat16)
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = faststep.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    objects = (optimizer, scheduler, scaler)
    before = [dict(vars(o)) for o in objects]
    accum = faststep.accumulate(optimizer, 2, model=model, dtype=torch.float32)
    accum.install(scaler=scaler, scheduler=scheduler)
    x, y = DATA[0]
    scaler.scale(loss_of(model, (x.bfloat16(), y))).backward()
    scaler.step(optimizer)
    dead = [weakref.ref(accum), weakref.ref(accum._window), weakref.ref(accum._window.sums)]
    dead.append(weakref.ref(accum._installed))
    accum.remove()
    accum.remove()
    with pytest.raises(RuntimeError, match="was removed"):
        accum.install()
    del accum
    gc.collect()
    assert [reference() for reference in dead] == [None] * 4
    for o, old in zip(objects, before, strict=True):
        assert vars(o).keys() - {"_opt_called"} == old.keys()
        for name in ("step", "zero_grad", "update", "unscale_"):
            assert vars(o).get(name) is old.get(name)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    for param in model.parameters():
        assert param.grad is None
        assert not param._post_accumulate_grad_hooks
        assert param.grad_dtype is torch.bfloat16
    faststep.accumulate(optimizer, 2)


def test_what_install_refuses() -> None:
    model = make_model()
    accum = faststep.accumulate(faststep.optim.SGD(model.parameters()), 2)
    with accum:
        loss_of(model, DATA[0]).backward()
    with pytest.raises(RuntimeError, match="not inside a window"):
        accum.install()
    accum.reset()
    accum.install()
    with pytest.raises(RuntimeError, match="called once"):
        accum.install()
    with pytest.raises(RuntimeError, match="without `with accum:`"), accum:
        pass
