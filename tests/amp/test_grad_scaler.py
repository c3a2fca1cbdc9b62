"""GradScaler is torch's: stages, errors, state dict, pickling."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import faststep.amp.grad_scaler
from compare import assert_same_tensors, outcome
from faststep.amp import GradScaler
from scalers import iterate, make_param, make_scaler

TORCHS = torch.amp.GradScaler
BOTH = pytest.mark.parametrize("cls", [TORCHS, GradScaler], ids=["torch", "faststep"])
KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]


def sgd(*grads: float | None, cls: type[torch.optim.Optimizer] = torch.optim.SGD) -> Any:
    """An optimizer with one parameter per gradient."""
    return cls([make_param(1.0, grad=None if g is None else [g]) for g in grads], lr=0.1)


class Fused(torch.optim.SGD):
    """torch's fused SGD."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, fused=True)


def test_it_is_torchs_class_with_torchs_arguments() -> None:
    assert issubclass(GradScaler, TORCHS)
    theirs = list(inspect.signature(TORCHS).parameters.values())
    ours = list(inspect.signature(GradScaler).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    assert {p.kind for p in ours[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY}


def calls_in_order(cls: type[Any], optimizer: Any, calls: list[str]) -> list[Any]:
    scaler = make_scaler(cls)
    methods = {
        "unscale": lambda: scaler.unscale_(optimizer),
        "step": lambda: scaler.step(optimizer),
        "closure": lambda: scaler.step(optimizer, closure=lambda: None),
        "update": lambda: scaler.update(),
    }
    return [outcome(methods[call]) for call in calls]


@pytest.mark.parametrize("kind", [torch.optim.SGD, Fused])
@pytest.mark.parametrize("grads", [(1.0,), (None,), (math.inf, None)])
@pytest.mark.parametrize(
    "calls",
    [
        "step update step update",
        "unscale step update unscale step update",
        "unscale unscale step step unscale update",
        "step unscale step update update",
        "update step update",
        "closure step closure update",
    ],
)
def test_stages_and_their_errors(
    calls: str, grads: tuple[float | None, ...], kind: type[Any]
) -> None:
    ours = calls_in_order(GradScaler, sgd(*grads, cls=kind), calls.split())
    theirs = calls_in_order(TORCHS, sgd(*grads, cls=kind), calls.split())
    assert ours == theirs


@pytest.mark.parametrize("name", ["unscale_", "step", "update"])
def test_before_any_scaled_loss(name: str) -> None:
    results = []
    for cls in (GradScaler, TORCHS):
        arguments = [] if name == "update" else [sgd(1.0)]
        results.append(outcome(partial(getattr(cls("cpu"), name), *arguments)))
    assert results[0] == results[1]
    assert "is None.  This may indicate" in results[0][2]


@pytest.mark.parametrize("kwargs", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
def test_factors_out_of_range(kwargs: dict[str, float]) -> None:
    assert outcome(lambda: GradScaler("cpu", **kwargs)) == outcome(lambda: TORCHS("cpu", **kwargs))
    assert GradScaler("cpu", enabled=False, **kwargs).state_dict() == {}


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


@BOTH
def test_disabled(cls: type[Any]) -> None:
    scaler = cls("cpu", enabled=False)
    param = make_param(1.0, grad=[math.inf])
    optimizer = torch.optim.SGD([param], lr=0.1)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, closure=lambda: 7.0) == 7.0
    scaler.update()
    scaler.load_state_dict({})
    assert param == -math.inf
    assert scaler.get_scale() == 1.0
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == {}


@BOTH
def test_scale_keeps_the_shape_of_its_argument(cls: type[Any]) -> None:
    scaler = cls("cpu", 4.0)
    ones = torch.ones(2)
    scaled = scaler.scale([ones, (ones, ones)])
    assert type(scaled) is list
    assert type(scaled[1]) is tuple
    assert_same_tensors([scaled[0], *scaled[1]], [ones * 4] * 3)
    lazy = scaler.scale(t for t in (ones,))
    assert_same_tensors(list(lazy), [ones * 4])
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler.scale(3)
    assert scaler._scale.dtype == torch.float32
    assert scaler._growth_tracker.dtype == torch.int32


@pytest.mark.parametrize("new_scale", [4.0, torch.tensor(4.0)])
def test_update_to_a_given_scale(new_scale: Any) -> None:
    for cls in (GradScaler, TORCHS):
        scaler = make_scaler(cls)
        tensor = scaler._scale
        scaler.unscale_(sgd(1.0))
        scaler.update(new_scale)
        assert scaler.get_scale() == 4.0
        assert scaler._scale is tensor
        assert scaler._get_growth_tracker() == 0
        assert not scaler._per_optimizer_states


@pytest.mark.parametrize(
    "new_scale",
    [
        torch.tensor([1.0, 2.0]),
        torch.tensor([4.0]),
        torch.tensor(1.0, requires_grad=True),
        torch.ones((), device="meta"),
        3,
    ],
    ids=["two", "1-d", "requires grad", "device", "int"],
)
def test_update_to_a_scale_of_the_wrong_kind(new_scale: Any) -> None:
    ours, theirs = (
        outcome(partial(make_scaler(cls).update, new_scale)) for cls in (GradScaler, TORCHS)
    )
    assert ours == theirs
    assert ours[0] == "error"


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


@BOTH
def test_an_empty_state_dict_is_an_error(cls: type[Any]) -> None:
    with pytest.raises(RuntimeError, match="The source state dict is empty, possibly because it"):
        cls("cpu").load_state_dict({})


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


@BOTH
def test_pickling_in_the_middle_of_an_iteration_is_an_error(cls: type[Any]) -> None:
    scaler = make_scaler(cls)
    optimizer = sgd(1.0)
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
        pickle.dumps(scaler)
    scaler.step(optimizer)
    scaler.update()
    other = pickle.loads(pickle.dumps(scaler))
    assert type(other) is cls
    assert other.state_dict() == scaler.state_dict()


@BOTH
def test_factors_can_be_changed(cls: type[Any]) -> None:
    scaler = make_scaler(cls)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.1)
    scaler.set_growth_interval(1)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (4.0, 0.1)
    assert scaler.get_growth_interval() == 1
    assert iterate(scaler, False) == 32.0
    assert iterate(scaler, True) == pytest.approx(3.2)


def test_found_inf_is_combined_over_optimizers_and_not_written() -> None:
    scaler = make_scaler()
    first, second, third = sgd(1.0), sgd(math.inf), sgd(math.nan)
    for optimizer in (first, second, third):
        scaler.unscale_(optimizer)
    recorded = [t for o in (second, third, first) for t in scaler._found_inf_per_device(o).values()]
    assert [t.item() for t in recorded] == [1.0, 1.0, 0.0]
    for optimizer in (second, third, first):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert [t.item() for t in recorded] == [1.0, 1.0, 0.0]
