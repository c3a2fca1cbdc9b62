"""Python code that runs in the middle of a step: keys, modes, subclasses, what is let go of.

Whatever it drops or replaces, a parameter must be as it was or have taken its own step, never one
with another tensor's values.
"""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

import faststep

from .acting import (
    COUNT,
    LR,
    SIZE,
    Action,
    Model,
    alike,
    bound_again,
    long_alike,
    over_actions,
    replace_memory_of_grads,
    step,
    with_states,
)
from .common import records


class EqualKey:
    """A key that a dictionary has to compare with the name of a state."""

    def __init__(self, name: str, action: Action) -> None:
        self.name, self.action = name, action

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        self.action()
        return self.name == other


class EqualStr(str):
    action: Action

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        self.action()
        return str.__eq__(self, other)


def equal_str(name: str, action: Action) -> EqualStr:
    key = EqualStr(name)
    key.action = action
    return key


@pytest.mark.parametrize("key", [EqualKey, equal_str], ids=["object", "str"])
@over_actions
def test_key_that_compares_itself(
    key: Callable[[str, Action], Any], action: Callable[[Model], None]
) -> None:
    """The states are found under such a key, as torch finds them, whatever it does meanwhile."""
    model = alike()
    done: list[int] = []

    def act() -> None:
        if not done and armed:
            done.append(1)
            action(model)

    armed = False
    values = model.optimizer.state[model.params[COUNT // 2]]
    values[key("momentum_buffer", act)] = values.pop("momentum_buffer")
    model.backward()
    before = model.values()
    armed = True
    step(model, action)
    assert done
    model.assert_own_values(before)


def test_key_that_compares_itself_is_found() -> None:
    model = with_states()
    values = model.optimizer.state[model.params[3]]
    buffer = values.pop("momentum_buffer")
    values[EqualKey("momentum_buffer", lambda: None)] = buffer
    for _ in range(2):
        model.backward()
        model.optimizer.step()
        assert len(values) == 1
    assert torch.equal(buffer, torch.full((SIZE,), 6.0))


@pytest.mark.parametrize("made", [bound_again, long_alike])
@over_actions
def test_mode_that_reads_gradients(
    action: Callable[[Model], None], made: Callable[[], Model]
) -> None:
    """torch.set_default_device and other modes run Python code for each attribute of a tensor."""
    model = made()
    model.backward()
    before = model.values()

    class Mode(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func == Tensor.grad.__get__:
                self.calls += 1
                if self.calls == COUNT // 2:
                    with torch._C.DisableTorchFunction():
                        action(model)
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        step(model, action)
    assert mode.calls >= COUNT // 2
    model.assert_own_values(before)


class Acting(Parameter):
    """Does something when it is asked for its gradient."""

    action: Action | None = None

    @property
    def grad(self) -> Tensor | None:
        if self.action is not None:
            self.action()
        return Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        Tensor.grad.__set__(self, value)


@pytest.mark.parametrize("work", ["step", "clip"])
@over_actions
def test_subclass_that_acts(action: Callable[[Model], None], work: str) -> None:
    model = with_states()
    acting = Acting(torch.zeros(SIZE))
    index = COUNT // 2
    model.optimizer.param_groups[0]["params"][index] = model.params[index] = acting
    model.optimizer.state[acting]["momentum_buffer"] = torch.zeros(SIZE)
    model.backward()
    before = model.values()
    acting.action = lambda: (setattr(acting, "action", None), action(model))
    if work == "clip":
        faststep.clip_grad_norm_(list(model.params), 1e30)
    else:
        step(model, action)
    assert acting.action is None
    model.assert_own_values(before)


class Watching(Parameter):
    """Does something each time that torch asks it whether it is negated."""

    action: Action | None = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.is_neg and cls.action is not None:
                cls.action()
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("work", ["step", "clip"])
def test_subclass_that_moves_memory_each_time(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where records are not known torch is asked for the negative bit, but not the subclass."""
    model = with_states()
    watching = Watching(torch.zeros(SIZE))
    model.optimizer.param_groups[0]["params"][-1] = model.params[-1] = watching
    model.optimizer.state[watching]["momentum_buffer"] = torch.zeros(SIZE)
    model.backward()
    before = model.values()
    monkeypatch.setattr(Watching, "action", staticmethod(lambda: replace_memory_of_grads(model)))
    with records(known=False):
        if work == "clip":
            faststep.clip_grad_norm_(list(model.params), 1e-6)
        else:
            model.optimizer.step()
    monkeypatch.undo()
    model.assert_own_values(before)
    if work == "clip":
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.params if p.grad is not None])
        torch.testing.assert_close(norm, torch.tensor(1e-6))


def test_groups_that_grow_in_a_step() -> None:
    """Parameters that come while a step looks for gradients belong to the next one."""
    late = [Parameter(torch.ones(SIZE)) for _ in range(500)]
    for p in late:
        p.grad = torch.ones(SIZE)
    first, second = Acting(torch.zeros(SIZE)), Parameter(torch.zeros(SIZE))
    first.grad, second.grad = torch.ones(SIZE), torch.ones(SIZE)
    optimizer = faststep.optim.SGD([{"params": [first]}, {"params": [second]}], LR)
    first.action = lambda: (
        setattr(first, "action", None),
        optimizer.param_groups[1]["params"].extend(late),
    )
    optimizer.step()
    assert torch.equal(second, torch.full((SIZE,), -LR))
    assert all(bool((p == 1).all()) for p in late)
    optimizer.step()
    assert all(bool((p == 1 - LR).all()) for p in late)


class Last:
    """Acts when the tensor that it hangs on is gone."""

    def __init__(self, action: Action) -> None:
        self.action = action

    def __del__(self) -> None:
        self.action()


@pytest.mark.parametrize("more", [0, 1])
def test_parameter_that_needs_another_state(more: int) -> None:
    """It does not take what was found for the next parameter, or what lies behind all of them."""
    params = [Parameter(torch.zeros(SIZE)) for _ in range(1 + more)]
    optimizer = faststep.optim.AdamW(params, LR, master_weights=True)
    for p in params:
        p.grad = torch.ones(SIZE)
    optimizer.step()
    first = params[0]
    acted: list[int] = []

    def act() -> None:
        if armed and not acted:
            acted.append(1)
            first.grad = None
            first.data = torch.ones(SIZE, dtype=torch.bfloat16)
            first.grad = torch.ones(SIZE, dtype=torch.bfloat16)

    armed = False
    values = optimizer.state[first]
    values[EqualKey("exp_avg_sq", act)] = values.pop("exp_avg_sq")
    armed = True
    with pytest.raises(RuntimeError, match="group 0 were changed during the step"):
        optimizer.step()
    assert acted
    assert bool((first == 1).all())
    optimizer.step()
    assert not bool((first == 1).any())


@over_actions
def test_state_that_acts_when_it_is_replaced(action: Callable[[Model], None]) -> None:
    """The optimizer lets go of a small state when the next step sees that it was replaced."""
    model = alike()
    p = model.params[COUNT // 2]
    acted: list[int] = []
    values = model.optimizer.state[p]
    values["momentum_buffer"].last = Last(lambda: (acted.append(1), action(model)))
    values["momentum_buffer"] = torch.zeros(SIZE)
    model.backward()
    before = model.values()
    model.optimizer.step()
    assert acted
    model.assert_own_values(before)


def test_state_that_steps_when_it_is_let_go() -> None:
    """Each time that the optimizer lets go of its tensors it is ready for another step."""
    model = alike()
    acted = []
    for p in model.params:
        buffer = model.optimizer.state[p].pop("momentum_buffer")
        buffer.last = Last(lambda: (acted.append(1), model.optimizer.step()))
        model.optimizer.state[p]["momentum_buffer"] = torch.zeros(SIZE)
        del buffer
    model.backward()
    model.optimizer.load_state_dict(model.optimizer.state_dict())
    assert len(acted) == COUNT
    for i, p in enumerate(model.params):
        buffer = model.optimizer.state[p]["momentum_buffer"]
        assert bool((buffer % (i + 1) == 0).all()) or bool(buffer.isfinite().all())


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_left_as_it_was(enabled: bool) -> None:
    """After steps, errors, and code that runs in a step and switches it itself."""
    model = with_states()
    acting = Acting(torch.zeros(SIZE))
    model.optimizer.add_param_group({"params": [acting]})
    before = gc.isenabled()
    seen = []
    try:
        for switches in (False, True):
            (gc.enable if enabled else gc.disable)()
            model.backward()
            acting.grad = torch.ones(SIZE)

            def act(switches: bool = switches) -> None:
                seen.append(gc.isenabled())
                if switches:
                    (gc.disable if enabled else gc.enable)()

            acting.action = act
            model.optimizer.step()
            acting.action = None
            assert gc.isenabled() == (enabled != switches)
            acting.action = act
            faststep.clip_grad_norm_([*model.params, acting], 1.0)
            acting.action = None
            (gc.enable if enabled else gc.disable)()
            acting.grad = None
            acting.grad = torch.ones(SIZE).to_sparse()
            for group in model.optimizer.param_groups:
                group["fused"] = True  # which torch refuses
            with pytest.raises(RuntimeError, match="sparse"):
                model.optimizer.step()
            with pytest.raises(AttributeError, match="grad"):
                faststep.clip_grad_norm_([3], 1.0)  # type: ignore[list-item]
            assert gc.isenabled() == enabled
            acting.grad = None
        assert enabled in seen
    finally:
        (gc.enable if before else gc.disable)()


def test_gradients_replaced_by_another_thread() -> None:
    """A long step lets other threads run, and holds its tensors: each takes its own step."""
    count, size = 8, 1 << 18
    params = [Parameter(torch.zeros(size)) for _ in range(count)]
    optimizer = faststep.optim.SGD(params, LR, momentum=0.5)
    for i, p in enumerate(params):
        p.grad = torch.full((size,), i + 1.0)
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            for i, p in enumerate(params):
                p.grad = torch.full((size,), i + 1.0)
                optimizer.state[p]["momentum_buffer"] = torch.zeros(size)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(20):
            optimizer.step()
    finally:
        stop.set()
        thread.join()
    for p in params:
        assert p[0].item() < 0
        assert bool((p == p[0]).all())
