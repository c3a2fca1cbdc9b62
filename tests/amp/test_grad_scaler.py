"""GradScaler has torch's arguments and states, and hysteresis; tests/oracle compares its calls."""

import copy
import inspect
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import faststep.amp.grad_scaler
from faststep.amp import GradScaler
from scalers import iterate, make_param, make_scaler

TORCHS = torch.amp.GradScaler
KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]


def test_it_is_torchs_class_with_torchs_arguments() -> None:
    assert issubclass(GradScaler, TORCHS)
    theirs = list(inspect.signature(TORCHS).parameters.values())
    ours = list(inspect.signature(GradScaler).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    assert {p.kind for p in ours[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("missing", [True, False])
def test_without_cuda_it_warns_at_the_callers_line_and_disables_itself(
    monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    monkeypatch.setattr(faststep.amp.grad_scaler, "cuda_amp_is_unavailable", lambda: missing)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: missing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, theirs = GradScaler(), TORCHS()
    assert ours.is_enabled() is theirs.is_enabled() is (not missing)
    seen = [(str(w.message), w.category, w.filename) for w in caught]
    assert len(seen) == 2 * missing
    assert len(set(seen)) == missing
    assert all(filename == __file__ for _, _, filename in seen)


def test_a_given_scale_is_taken_without_regard_to_the_bounds() -> None:
    scaler = make_scaler(min_scale=4.0, max_scale=16.0)
    scaler.update(1024.0)
    assert scaler.get_scale() == 1024.0


@pytest.mark.parametrize(("source", "target"), [(TORCHS, GradScaler), (GradScaler, TORCHS)])
@pytest.mark.parametrize("started", [True, False])
def test_state_dicts_go_both_ways(source: type[Any], target: type[Any], started: bool) -> None:
    first = make_scaler(source, 32.0, growth_factor=3.0, backoff_factor=0.3, growth_interval=4)
    for overflow in (True, False, False):
        iterate(first, overflow)
    state = first.state_dict()
    assert list(state) == KEYS
    second = make_scaler(target) if started else target("cpu")
    second.load_state_dict(state)
    assert second.state_dict() == state
    second.scale(torch.zeros(()))
    steps = [False, False, True, False]
    assert [iterate(first, o) for o in steps] == [iterate(second, o) for o in steps]


@pytest.mark.parametrize(
    "copied",
    [
        lambda s: pickle.loads(pickle.dumps(s)),
        copy.deepcopy,
        lambda s: _loaded(s, started=True),
        lambda s: _loaded(s, started=False),
    ],
    ids=["pickle", "deepcopy", "state dict", "state dict before the first loss"],
)
def test_hysteresis_survives_a_copy(copied: Callable[[Any], Any]) -> None:
    scaler = make_scaler(init_scale=64.0, growth_interval=3, hysteresis=3)
    steps = [True, False, True]
    assert [iterate(scaler, o) for o in steps] == [64.0] * 3
    other = copied(scaler)
    other.scale(torch.zeros(()))
    assert other.state_dict() == scaler.state_dict()
    assert other.state_dict()["_hysteresis_tracker"] == 1
    assert iterate(other, True) == iterate(scaler, True) == 32.0
    assert [iterate(other, False) for _ in range(3)] == [32.0, 32.0, 64.0]


def _loaded(scaler: GradScaler, started: bool) -> GradScaler:
    other = GradScaler("cpu", hysteresis=3)
    if started:
        other.scale(torch.zeros(()))
    other.load_state_dict(scaler.state_dict())
    return other


def test_state_dicts_with_and_without_hysteresis_mix() -> None:
    with_hysteresis = make_scaler(hysteresis=3, growth_interval=100)
    iterate(with_hysteresis, True)
    state = with_hysteresis.state_dict()
    assert list(state) == [*KEYS, "_hysteresis_tracker"]
    for cls in (TORCHS, GradScaler):
        other = make_scaler(cls)
        other.load_state_dict(state)
        assert other.state_dict() == {key: state[key] for key in KEYS}
    with_hysteresis.load_state_dict(make_scaler(TORCHS).state_dict())
    assert with_hysteresis.state_dict()["_hysteresis_tracker"] == 3
    fewer = make_scaler(hysteresis=2)
    fewer.load_state_dict({**state, "_hysteresis_tracker": 3})
    assert fewer.state_dict()["_hysteresis_tracker"] == 2


def test_found_inf_is_combined_over_optimizers_and_not_written() -> None:
    scaler = make_scaler()
    first, second, third = (
        torch.optim.SGD([make_param(1.0, grad=[g])], lr=0.1) for g in (1.0, math.inf, math.nan)
    )
    for optimizer in (first, second, third):
        scaler.unscale_(optimizer)
    recorded = [t for o in (second, third, first) for t in scaler._found_inf_per_device(o).values()]
    assert [t.item() for t in recorded] == [1.0, 1.0, 0.0]
    for optimizer in (second, third, first):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert [t.item() for t in recorded] == [1.0, 1.0, 0.0]
