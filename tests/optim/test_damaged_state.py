"""A state that lacks a part is an error, as torch's loop has it, and no first step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import faststep
from faststep.optim.masters import MASTER

from .common import (
    TOLERANCE,
    Snapshot,
    assert_near,
    assert_same_bits,
    outcome,
    parameters,
    set_gradients,
    train,
)
from .declarations import ADAMW, ALL, LION, SGD, TORCHS, Declaration
from .test_masters import CLASSES

SHAPES = ((5,), (4, 3))

Damage = Callable[[dict[str, Any]], None]


def without(*keys: str) -> Damage:
    def damage(state: dict[str, Any]) -> None:
        for key in keys:
            state.pop(key, None)

    return damage


def eight_bit(state: dict[str, Any]) -> None:
    """What bitsandbytes keeps."""
    state.clear()
    state.update(
        step=torch.tensor(3.0),
        state1=torch.zeros(12, dtype=torch.uint8),
        state2=torch.zeros(12, dtype=torch.uint8),
        qmap1=torch.zeros(256),
        qmap2=torch.zeros(256),
        absmax1=torch.zeros(1),
        absmax2=torch.zeros(1),
    )


DAMAGES: dict[str, Damage] = {
    "step": without("step"),
    "exp_avg": without("exp_avg"),
    "exp_avg_sq": without("exp_avg_sq"),
    "max_exp_avg_sq": without("max_exp_avg_sq"),
    "all but step": without("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "momentum_buffer": without("momentum_buffer"),
    "everything": lambda state: state.clear(),
    "8 bits": eight_bit,
    "a note only": lambda state: (state.clear(), state.update(note=1)),
    "a note more": lambda state: state.update(note=1),
    "nothing": lambda state: None,
}

SETTINGS = {
    "Adam": ({}, {"amsgrad": True}),
    "AdamW": ({}, {"amsgrad": True}),
    "SGD": ({"momentum": 0.9}, {}),
}


def trained(cls: Any, settings: dict[str, Any], damage: Damage) -> tuple[Any, list[Tensor]]:
    """An optimizer whose second parameter's state was damaged after two steps."""
    params = parameters(*SHAPES)
    optimizer = cls(params, **{"lr": 1e-2, **settings})
    train(optimizer, params, steps=2)
    damage(optimizer.state[params[1]])
    set_gradients(params, 2)
    return optimizer, params


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("declaration", "settings"),
    [(d, settings) for d in TORCHS for settings in SETTINGS[d.name]],
    ids=lambda value: getattr(value, "name", None) or "+".join(value) or "plain",
)
def test_each_case_as_torch(
    declaration: Declaration, settings: dict[str, Any], damage: str
) -> None:
    """The same exception or the same step; after an exception of ours nothing has changed."""
    theirs, their_params = trained(declaration.torchs, settings, DAMAGES[damage])
    ours, params = trained(declaration.ours, settings, DAMAGES[damage])
    before = Snapshot(ours)
    their_error, their_key, _ = outcome(theirs.step)
    error, text, _ = outcome(ours.step)
    assert error is their_error
    if error is None:
        for mine, other in zip(params, their_params, strict=True):
            assert_near(mine, other, TOLERANCE, "after the step")
        return
    assert error is KeyError
    before.assert_unchanged()
    assert their_key in text  # "'exp_avg'"
    assert "state of parameter 1 in group 0 (shape (4, 3), torch.float32, cpu)" in text
    assert "nothing was updated" in text


@pytest.mark.parametrize("option", ["amsgrad", "momentum"])
def test_an_option_that_is_switched_on_later(option: str) -> None:
    """amsgrad needs what was not kept; momentum may begin at any step."""
    declaration = ADAMW if option == "amsgrad" else SGD
    results = []
    for cls in (declaration.torchs, declaration.ours):
        params = parameters(*SHAPES)
        optimizer = cls(params, lr=1e-2)
        train(optimizer, params, steps=2)
        optimizer.param_groups[0][option] = True if option == "amsgrad" else 0.9
        set_gradients(params, 2)
        results.append((outcome(optimizer.step)[0], params))
    (their_error, theirs), (error, ours) = results
    assert error is their_error is (KeyError if option == "amsgrad" else None)
    for mine, other in zip(ours, theirs, strict=True):
        assert_near(mine, other, TOLERANCE, "after the step")


def test_a_loaded_state_of_bitsandbytes_that_does_not_fit() -> None:
    """It is told which state it is, and the state before is still there."""
    optimizer, params = trained(faststep.optim.AdamW, {}, DAMAGES["nothing"])
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        eight_bit(state)
    before = Snapshot(optimizer)
    what = r"state of parameter 0: 'state1' has the shape \(12,\), and the parameter \(5,\)"
    with pytest.raises(ValueError, match=what):
        optimizer.load_state_dict(state_dict)
    before.assert_unchanged()
    set_gradients(params, 1)
    optimizer.step()


def test_lion_has_no_model_in_torch_and_does_the_same() -> None:
    optimizer, _ = trained(LION.ours, {}, eight_bit)
    before = Snapshot(optimizer)
    with pytest.raises(KeyError, match=r"state of parameter 1 in group 0 .*has no 'exp_avg'"):
        optimizer.step()
    before.assert_unchanged()
    optimizer, params = trained(LION.ours, {}, DAMAGES["everything"])
    optimizer.step()
    assert torch.count_nonzero(optimizer.state[params[1]]["exp_avg"]) == 12


@pytest.mark.parametrize("declaration", [d for d in ALL if d is not SGD], ids=lambda d: d.name)
def test_a_step_of_the_first_kind_after_the_refusal(declaration: Declaration) -> None:
    """Parameters without a state get one only if all others have theirs."""
    params = parameters(*SHAPES, (2,))
    optimizer = declaration.ours(params, lr=1e-2)
    set_gradients(params[1:2], 0)
    optimizer.step()
    optimizer.state[params[1]].pop("exp_avg")
    optimizer.state[params[1]]["other"] = 0
    set_gradients(params, 1)
    with pytest.raises(KeyError):
        optimizer.step()
    assert [p for p in params if optimizer.state.get(p)] == [params[1]]
    optimizer.state[params[1]].clear()
    optimizer.step()
    assert all(optimizer.state[p] for p in params)


@pytest.mark.parametrize("kept", [False, "fp32", "remainder16"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_state_that_is_none_as_torch(name: str, kept: Any) -> None:
    """torch begins a momentum buffer anew and fails otherwise; so does ours, whole."""
    kind, options = CLASSES[name]
    params = parameters(*SHAPES, dtype=torch.bfloat16)
    ours = getattr(faststep.optim, kind)(params, **options, master_weights=kept)
    train(ours, params, steps=2)
    for key in [key for key in ours.state[params[1]] if key != MASTER]:
        set_gradients(params, 2)
        whole = ours.state[params[1]][key]
        ours.state[params[1]][key] = None
        if hasattr(torch.optim, kind):
            theirs, _ = trained(
                getattr(torch.optim, kind), options, lambda s, key=key: s.update({key: None})
            )
            assert (outcome(theirs.step)[0] is None) == (kind == "SGD")
        if kind == "SGD":
            ours.step()
            assert ours.state[params[1]][key] is not None
            continue
        before = Snapshot(ours)
        with pytest.raises(RuntimeError, match=rf"state '{key}' of parameter 1 .* is None; noth"):
            ours.step()
        before.assert_unchanged()
        ours.state[params[1]][key] = whole
    ours.step()


@pytest.mark.parametrize("when", ["before", "later"])
def test_release(when: str) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = faststep.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    damaged = optimizer.state[model.bias]
    if when == "before":
        del damaged["exp_avg_sq"]
        with pytest.raises(KeyError, match=r"parameter 1 in group 0 .*has no 'exp_avg_sq'"):
            faststep.release_gradients(model, optimizer)
        optimizer.register_step_pre_hook(lambda *_: None)  # and no trace of the release is left
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return
    release = faststep.release_gradients(model, optimizer)
    del damaged["exp_avg_sq"]
    start = model.bias.detach().clone()
    with pytest.raises(KeyError, match=r"parameter 1 in group 0 .*has no 'exp_avg_sq'"):
        model(torch.ones(1, 3)).sum().backward()
    assert_same_bits([model.bias], [start])
    release.remove()


def test_memory_that_runs_out_between_two_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is tried again is the first one: no half of a state was left."""
    params = parameters((100, 100))
    optimizer = faststep.optim.AdamW(params)
    set_gradients(params, 0)
    like, calls = optimizer._zeros.like, []

    def short(param: Tensor, dtype: torch.dtype) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return like(param, dtype)

    monkeypatch.setattr(optimizer._zeros, "like", short)
    with pytest.raises(MemoryError):
        optimizer.step()
    optimizer.step()
    assert optimizer.state[params[0]]["step"].item() == 1.0
