"""Python code that runs in the middle of a step: finalizers, keys, modes and subclasses.

Up to CPython 3.11 the cyclic collector, and with it any finalizer, runs whenever a container is
allocated, in C too. Whatever such code drops or replaces, a parameter must be as it was or have
taken its own step, never one with another tensor's values.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

import faststep
from faststep import _C

COUNT, SIZE, LR = 60, 64, 0.5
POISON = -(2.0**20)  # what memory that was freed too early holds
Action = Callable[[], None]


@dataclasses.dataclass
class Fuse:
    action: Action
    burnt: bool = False
    cut: bool = False


class Bomb:
    """Garbage that acts when it is collected for the n-th time; its fuse can be cut."""

    def __init__(self, fuse: Fuse, left: int) -> None:
        self.itself, self.fuse, self.left = self, fuse, left

    def __del__(self) -> None:
        if self.fuse.cut:
            return
        if self.left:
            Bomb(self.fuse, self.left - 1)
        else:
            self.fuse.burnt = True
            self.fuse.action()


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """The collector runs at every allocation, over young objects only."""
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    gc.set_threshold(1, 1000, 1000)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
    gc.collect()
    if enabled:
        gc.enable()


class Model:
    """Parameters whose gradients are known and have no Python object, as after backward."""

    def __init__(self, make: Callable[..., Any] = faststep.optim.SGD, **kwargs: Any) -> None:
        self.params = [Parameter(torch.zeros(SIZE)) for _ in range(COUNT)]
        self.optimizer = make(self.params, lr=LR, **kwargs)
        self.others: list[Tensor] = []

    def backward(self) -> None:
        self.optimizer.zero_grad()
        sum((p * (i + 1)).sum() for i, p in enumerate(self.params)).backward()

    def take_memory(self) -> None:
        """Fills memory that has just been freed."""
        self.others += [torch.full((SIZE,), POISON) for _ in range(4 * COUNT)]

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.params]

    def assert_own_values(self, before: list[Tensor]) -> None:
        """Each parameter is what it was, or has stepped by its own gradient; no memory that
        belongs to others was written."""
        stepped = [p - LR * (i + 1) for i, p in enumerate(before)]
        wrong = [
            i
            for i, (p, q, r) in enumerate(zip(self.params, before, stepped, strict=True))
            if not (torch.equal(p, q) or torch.allclose(p, r))
        ]
        assert not wrong, f"{len(wrong)} of {COUNT} parameters took other values"
        self.assert_untouched()

    def assert_untouched(self) -> None:
        assert all(bool((other == POISON).all()) for other in self.others)


def drop_grads(model: Model) -> None:
    for p in model.params:
        p.grad = None
    model.take_memory()


def replace_grads(model: Model) -> None:
    for i, p in enumerate(model.params):
        p.grad = torch.full((SIZE,), i + 1.0)
    model.take_memory()


def replace_memory_of_grads(model: Model) -> None:
    for i, p in enumerate(model.params):
        if p.grad is not None:
            p.grad.data = torch.full((SIZE,), i + 1.0)
    model.take_memory()


def clear_state(model: Model) -> None:
    for values in model.optimizer.state.values():
        values.clear()
    model.optimizer.state.clear()
    model.take_memory()


def clear_groups(model: Model) -> None:
    params = model.optimizer.param_groups[0]["params"]
    model.optimizer.param_groups[0]["params"] = list(params)
    params.clear()
    model.take_memory()


ACTIONS = (drop_grads, replace_grads, replace_memory_of_grads, clear_state, clear_groups)
over_actions = pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)


def explode_in(model: Model, action: Callable[[Model], None], work: Action, left: int) -> bool:
    """Calls `work` while the collector runs; whether the bomb went off there."""
    fuse = Fuse(lambda: action(model))
    Bomb(fuse, left)
    gc.enable()
    try:
        work()
    finally:
        gc.disable()
        fuse.cut = True
    return fuse.burnt


def explosions(
    make: Callable[[], Model],
    action: Callable[[Model], None],
    work: Callable[[Model], object],
    check: Callable[[Model], None] = Model.assert_untouched,
) -> int:
    """`action` at many points of `work`, each on a model of its own; how often it came there."""
    hits = 0
    for left in range(0, 2 * COUNT, 6):
        model = make()
        model.backward()
        hits += explode_in(model, action, functools.partial(work, model), left)
        check(model)
    return hits


def plain() -> Model:
    return Model()


def with_states() -> Model:
    """States are there, so that the first step binds them."""
    model = Model(momentum=0.5)
    for p in model.params:
        model.optimizer.state[p]["momentum_buffer"] = torch.zeros(SIZE)
    return model


def alike() -> Model:
    """The next step is like the ones before."""
    model = with_states()
    for _ in range(3):
        model.backward()
        model.optimizer.step()
    with torch.no_grad():
        for p in model.params:
            p.zero_()
            model.optimizer.state[p]["momentum_buffer"].zero_()
    return model


@pytest.mark.parametrize("make", [plain, with_states, alike], ids=lambda make: make.__name__)
@over_actions
@pytest.mark.usefixtures("eager_collector")
def test_finalizer_in_a_step(make: Callable[[], Model], action: Callable[[Model], None]) -> None:
    zeros = [torch.zeros(SIZE)] * COUNT
    assert explosions(
        make, action, lambda model: model.optimizer.step(), lambda m: m.assert_own_values(zeros)
    )


def keep_grads() -> Model:
    return Model(max_grad_norm=1e30, keep_grads=True)


@over_actions
@pytest.mark.usefixtures("eager_collector")
def test_finalizer_in_a_step_that_writes_gradients(action: Callable[[Model], None]) -> None:
    zeros = [torch.zeros(SIZE)] * COUNT
    assert explosions(
        keep_grads,
        action,
        lambda model: model.optimizer.step(),
        lambda model: model.assert_own_values(zeros),
    )


def step(model: Model, action: Callable[[Model], None]) -> None:
    """A step in the middle of which the parameters may go."""
    if action is clear_groups:
        with pytest.raises(RuntimeError, match="group 0 were changed"):
            model.optimizer.step()
    else:
        model.optimizer.step()


def clip(model: Model) -> None:
    """The norm is that of gradients: those that there were, those that are left, or some."""
    whole = math.sqrt(SIZE * sum((i + 1.0) ** 2 for i in range(COUNT)))
    assert 0 <= faststep.clip_grad_norm_(model.params, 1.0) <= whole * 1.0001


def unscale(model: Model) -> None:
    scaler = faststep.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(model.optimizer)
    assert not any(scaler._found_inf_per_device(model.optimizer).values())


@pytest.mark.parametrize("work", [clip, unscale], ids=lambda work: work.__name__)
@pytest.mark.parametrize("action", [drop_grads, replace_grads], ids=lambda action: action.__name__)
@pytest.mark.usefixtures("eager_collector")
def test_finalizer_in_clipping(
    work: Callable[[Model], None], action: Callable[[Model], None]
) -> None:
    assert explosions(plain, action, work)


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
    model = with_states()
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


@over_actions
def test_mode_that_reads_gradients(action: Callable[[Model], None]) -> None:
    """torch.set_default_device and other modes run Python code for each attribute of a tensor."""
    model = with_states()
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
            with pytest.raises(RuntimeError, match="sparse"):
                model.optimizer.step()
            with pytest.raises(AttributeError, match="grad"):
                faststep.clip_grad_norm_([3], 1.0)  # type: ignore[list-item]
            assert gc.isenabled() == enabled
            acting.grad = None
        assert enabled in seen
    finally:
        (gc.enable if before else gc.disable)()


def test_measured_gradients_that_act_when_they_are_dropped() -> None:
    """Slots move when more are made, which a finalizer may do while one is filled."""
    squares = _C.Squares()
    params = [Parameter(torch.zeros(SIZE)) for _ in range(400)]
    for i, p in enumerate(params):
        p.grad = torch.full((SIZE,), i + 1.0)

    def measure_more() -> None:
        if params[300].grad is not None:
            squares.measure(300, params[300])

    for again in range(2):
        params[0].grad = torch.ones(SIZE)
        params[0].grad.last = Last(measure_more)
        assert squares.measure(0, params[0])
        params[0].grad = torch.full((SIZE,), 2.0)
        if again:
            assert squares.adopt(0, params[0], params[0].grad._version)
        else:
            assert squares.measure(0, params[0])
    assert squares.check([params[:1]], None) is None


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
