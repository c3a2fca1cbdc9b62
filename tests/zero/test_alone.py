"""One process, with or without a process group: the ordinary fused optimizer."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import faststep
from faststep import zero

from .common import SHAPES, Given, differences, grads_for


def _pair() -> tuple[Given, Given, Any, Any]:
    one, other = Given(SHAPES, [torch.float32]), Given(SHAPES, [torch.float32])
    sharded = zero.shard(one, torch.optim.AdamW(one.parameters(), lr=0.01), stage=1)
    return one, other, sharded, faststep.optim.AdamW(other.parameters(), lr=0.01)


@pytest.mark.parametrize("how", ["plain", "max_norm", "unscale"])
@pytest.mark.parametrize("ours", [True, False])
def test_scalers(how: str, ours: bool) -> None:
    one, other, sharded, reference = _pair()
    kind = faststep.amp.GradScaler if ours else torch.amp.GradScaler
    for model, optimizer in ((one, sharded), (other, reference)):
        scaler = kind("cpu", init_scale=64.0)
        for step in range(4):
            grads = grads_for(model, step)
            if step == 2:
                grads[4][7] = float("inf")
            scaler.scale(model(grads)).backward()
            if how == "unscale":
                scaler.unscale_(optimizer)
                faststep.clip_grad_norm_(list(model.parameters()), 1.0)
            if how == "max_norm" and ours:
                scaler.step(optimizer, max_norm=1.0)
            else:
                scaler.step(optimizer)
            scaler.update()
            if ours or optimizer is sharded:  # else torch's scaler does not call the step
                assert optimizer.step_was_skipped is (step == 2)
            optimizer.zero_grad()
        assert scaler.get_scale() == 32.0
        assert "found_inf" not in vars(optimizer)
    assert differences(one.parameters(), other.parameters()) == []
    assert "grad_scale" not in vars(sharded._owned)


def test_clipping_accumulation_and_contexts() -> None:
    one, other, sharded, reference = _pair()
    sharded.max_grad_norm = reference.max_grad_norm = 0.5
    for model, optimizer in ((one, sharded), (other, reference)):
        accum = faststep.accumulate(optimizer, 2)
        for step in range(4):
            with accum:
                accum.backward(model(grads_for(model, step)))
            if accum.ready:
                optimizer.step()
                optimizer.zero_grad()
        accum.remove()
    assert torch.equal(sharded.last_grad_norm, reference.last_grad_norm)
    assert differences(one.parameters(), other.parameters()) == []
    with sharded.no_sync():
        one(grads_for(one, 9)).backward()
    sharded.wait()
    other(grads_for(other, 9)).backward()
    expected = faststep.clip_grad_norm_(list(other.parameters()), 1.0)
    assert torch.equal(sharded.clip_grad_norm_(1.0), expected)


def test_state_dicts_and_what_is_replaced() -> None:
    one, other, sharded, reference = _pair()
    for model, optimizer in ((one, sharded), (other, reference)):
        model(grads_for(model, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy(sharded.state_dict())
    assert saved.keys() == reference.state_dict().keys()
    group = sharded.param_groups[0]
    sharded.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert sharded.param_groups[0] is group
    reference.load_state_dict(saved)
    for model, optimizer in ((one, sharded), (other, reference)):
        model(grads_for(model, 2)).backward()
        optimizer.step()
    assert differences(one.parameters(), other.parameters()) == []
    with pytest.raises(ValueError, match="different number of parameter groups"):
        sharded.load_state_dict({"state": {}, "param_groups": []})
    replaced = sharded._replaced
    for use in (replaced.step, replaced.state_dict, lambda: replaced.load_state_dict(saved)):
        with pytest.raises(RuntimeError, match=r"was replaced by what faststep\.zero\.shard"):
            use()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"stage": 0}, ValueError, "stage must be 1, 2 or 3"),
        ({"bucket_mb": 0}, ValueError, "bucket_mb must be positive"),
        ({"gather": "later"}, ValueError, "gather must be"),
        ({"max_grad_norm": -1.0}, ValueError, "Invalid max_grad_norm"),
    ],
)
def test_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(error, match=text):
        zero.shard(model, torch.optim.SGD(model.parameters()), **options)


def test_options_of_the_optimizer() -> None:
    model = nn.Linear(2, 2)
    clips = faststep.optim.SGD(model.parameters(), max_grad_norm=2.0)
    assert zero.shard(model, clips).max_grad_norm == 2.0
    made = faststep.optim.SGD(model.parameters(), max_grad_norm=2.0, keep_grads=True)
    with pytest.raises(TypeError, match="keep_grads"):
        zero.shard(model, made)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        zero.shard(list(model.parameters()), clips)  # type: ignore[arg-type]
