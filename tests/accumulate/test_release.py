"""release_gradients(): the bits of the ordinary step, without the gradients."""

import functools
import gc
import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import faststep
from faststep.release.updates import Release
from optim.declarations import OTHERS

from .common import assert_close, assert_equal, batches, loss_of, make_model, values

MAKE: dict[str, Any] = {
    "AdamW": lambda ps, **kw: faststep.optim.AdamW(ps, lr=0.01, **kw),
    "amsgrad": lambda ps, **kw: faststep.optim.Adam(ps, lr=0.01, amsgrad=True, **kw),
    "SGD": lambda ps, **kw: faststep.optim.SGD(ps, lr=0.1, **kw),
    "momentum": lambda ps, **kw: faststep.optim.SGD(ps, lr=0.1, momentum=0.9, **kw),
    "Lion": lambda ps, **kw: faststep.optim.Lion(ps, lr=0.01, **kw),
}
EVERY = MAKE | {d.name: functools.partial(d.ours, **d.kwargs) for d in OTHERS}
over_optimizers = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
DATA = batches([4] * 6)


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        value.clone()
        for _, entry in sorted(optimizer.state_dict()["state"].items())
        for value in entry.values()
        if isinstance(value, Tensor)
    ]


def train(make: Any, released: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    model = make_model(dtype)
    groups = [{"params": model[:2].parameters()}, {"params": model[2:].parameters(), "lr": 0.003}]
    optimizer = make(groups)
    scheduler = StepLR(optimizer, 2, 0.5)
    release = faststep.release_gradients(model, optimizer) if released else None
    for x, y in DATA:
        loss_of(model, (x.to(dtype), y)).backward()
        if release is not None:
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return values(model) + states(optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_the_bits_of_the_ordinary_step(make: Any, dtype: torch.dtype) -> None:
    """With groups, a scheduler, and states created in backward."""
    assert_equal(train(make, True, dtype), train(make, False, dtype))


def test_a_compiled_loop_calls_the_hooks_as_they_are() -> None:
    """The compiler traces what a compiled function calls, but not the hooks of a backward in it."""
    results, traced = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return graph.forward

    for compiles in (False, True):
        model = make_model()
        optimizer = MAKE["AdamW"](model.parameters())
        release = faststep.release_gradients(model, optimizer)

        def step(model: Any = model, optimizer: Any = optimizer, data: Any = DATA[0]) -> None:
            loss_of(model, data).backward()
            optimizer.step()

        call = torch.compile(step, backend=backend) if compiles else step
        for _ in range(3):
            call()
        assert release is not None
        results.append(values(model))
    assert_equal(*results)
    codes = [node.meta.get("stack_trace") or "" for graph in traced for node in graph.graph.nodes]
    assert any("loss_of" in code for code in codes)
    assert not any("release/updates" in code for code in codes)


def test_gradients_do_not_live_together() -> None:
    """When a gradient arrives, those before it are gone."""
    model = make_model()
    optimizer = MAKE["AdamW"](model.parameters())
    seen: list[weakref.ref[Tensor]] = []
    alive = []

    def count(grad: Tensor) -> None:
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(grad))

    for param in model.parameters():
        param.register_hook(count)
    release = faststep.release_gradients(model, optimizer)
    loss_of(model, DATA[0]).backward()
    assert len(alive) == 6
    assert max(alive) <= 1
    release.remove()


@over_optimizers
def test_clip_per_parameter(make: Any) -> None:
    model, reference = make_model(), make_model()
    optimizer = make(model.parameters(), max_grad_norm=0.02)
    release = faststep.release_gradients(model, optimizer, clip="per_parameter")
    alone = [make([p], max_grad_norm=0.02) for p in reference.parameters()]
    for batch in DATA:
        loss_of(model, batch).backward()
        optimizer.step()
        loss_of(reference, batch).backward()
        for one in alone:
            one.step()
            one.zero_grad()
    assert_equal(values(model), values(reference))
    release.remove()


def test_clip_per_parameter_follows_the_limit_without_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The extension reads the limit for each gradient; odd ones are left to Python."""
    model, reference = make_model(), make_model()
    optimizer = MAKE["AdamW"](model.parameters(), max_grad_norm=0.02)
    alone = [MAKE["AdamW"]([p]) for p in reference.parameters()]
    in_python = []
    original = Release.hooked

    def hooked(self: Any, param: torch.Tensor) -> None:
        in_python.append(param)
        original(self, param)

    monkeypatch.setattr(Release, "hooked", hooked)
    release = faststep.release_gradients(model, optimizer, clip="per_parameter")
    for limit, calls in (
        (0.02, 6),
        (0.02, 1),
        (0.5, 1),
        (math.inf, 1),
        (0.0, 1),
        (1, 6),
        (None, 1),
    ):
        in_python.clear()
        optimizer.max_grad_norm = limit
        loss_of(model, DATA[0]).backward()
        optimizer.step()
        assert len(in_python) == calls, limit
        loss_of(reference, DATA[0]).backward()
        for one in alone:
            one.max_grad_norm = limit
            one.step()
            one.zero_grad()
        assert_equal(values(model), values(reference))
    before = values(model)
    optimizer.max_grad_norm = math.nan
    with pytest.raises(ValueError, match="max_grad_norm"):
        loss_of(model, DATA[0]).backward()
    assert_equal(values(model), before)
    release.remove()


@pytest.mark.parametrize("limits", [(0.2,), (0.2, None, 0.1), (None, 0.2)])
def test_clip_lagged(limits: tuple[float | None, ...]) -> None:
    """The coefficient of a step is that of the norm of the step before, clipped or not."""
    model, reference = make_model(), make_model()
    optimizer = MAKE["SGD"](model.parameters(), max_grad_norm=0.2)
    release = faststep.release_gradients(model, optimizer, clip="lagged")
    last = None
    for batch, limit in zip(DATA, itertools.cycle(limits), strict=False):
        optimizer.max_grad_norm = limit
        loss_of(model, batch).backward()
        optimizer.step()
        loss_of(reference, batch).backward()
        grads = [p.grad.double() for p in reference.parameters()]
        norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads))
        with torch.no_grad():
            for param, grad in zip(reference.parameters(), grads, strict=True):
                of = float(grad.norm()) if last is None else last
                param -= 0.1 * min(1.0, (limit or math.inf) / (of + 1e-6)) * param.grad
                param.grad = None
        assert float(optimizer.last_grad_norm) == pytest.approx(norm, rel=1e-5)
        assert_close(values(model), values(reference), 1e-5)
        last = norm
    release.remove()


@pytest.mark.parametrize("clip", ["per_parameter", "lagged"])
def test_clip_sparse_gradients(clip: str) -> None:
    """Adagrad with the sparse gradients of an embedding, and with the same ones dense."""
    results = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 3, sparse=sparse), nn.Linear(3, 1))
        optimizer = faststep.optim.Adagrad(model.parameters(), lr=0.1, max_grad_norm=0.01)
        release = faststep.release_gradients(model, optimizer, clip=clip)
        for _ in range(3):
            model(torch.tensor([1, 2, 1])).sum().backward()
            optimizer.step()
        release.remove()
        results.append(values(model))
    assert_close(*results, 1e-6)


def test_clipping_without_a_choice_is_refused() -> None:
    model = make_model()
    optimizer = MAKE["SGD"](model.parameters(), max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r'clip="per_parameter".*clip="lagged"'):
        faststep.release_gradients(model, optimizer)
    optimizer.max_grad_norm = None
    release = faststep.release_gradients(model, optimizer)
    optimizer.max_grad_norm = 1.0
    before = values(model)
    with pytest.raises(ValueError, match="needs all gradients before the first update"):
        loss_of(model, DATA[0]).backward()
    assert_equal(values(model), before)
    release.remove()


def test_clipping_that_comes_too_late_is_refused() -> None:
    """Between backward and step, where torch's function finds nothing and returns 0."""
    model = make_model()
    optimizer = MAKE["SGD"](model.parameters())
    release = faststep.release_gradients(model, optimizer)
    loss_of(model, DATA[0]).backward()
    params = list(model.parameters())
    disabled = faststep.amp.GradScaler("cpu", enabled=False)
    for clip in (
        lambda: faststep.clip_grad_norm_(params, 1.0),
        lambda: faststep.clip_grad_norm_(params[:1], 1.0),
        lambda: faststep.clip_grad_value_(params, 1.0),
        lambda: faststep.clip_grads_with_norm_(params, 1.0, torch.tensor(2.0)),
        lambda: disabled.step(optimizer, max_norm=1.0),
    ):
        with pytest.raises(RuntimeError, match=r'cannot be clipped: .*clip="lagged"'):
            clip()
    optimizer.step()
    faststep.clip_grad_norm_(make_model().parameters(), 1.0)
    release.remove()
    faststep.clip_grad_norm_(params, 1.0)


@pytest.mark.parametrize("number", ["lr", "momentum", "weight_decay"])
def test_numbers_that_change_after_backward_are_refused(number: str) -> None:
    """Many loops set the learning rate just before the step, where it would come too late."""
    model = make_model()
    optimizer = MAKE["momentum"]([{"params": p} for p in model.parameters()])
    release = faststep.release_gradients(model, optimizer)
    loss_of(model, DATA[0]).backward()
    was = optimizer.param_groups[3][number]
    optimizer.param_groups[3][number] = 0.05
    with pytest.raises(RuntimeError, match="number of group 3 was changed between backward"):
        optimizer.step()
    optimizer.param_groups[3][number] = was
    optimizer.step()
    optimizer.param_groups[3][number] = 0.05
    loss_of(model, DATA[1]).backward()
    optimizer.step()
    release.remove()


def test_a_second_gradient_is_refused() -> None:
    model = make_model()
    optimizer = MAKE["SGD"](model.parameters())
    release = faststep.release_gradients(model, optimizer)
    loss_of(model, DATA[0]).backward()
    with pytest.raises(RuntimeError, match="a second gradient of parameter 5 of group 0"):
        loss_of(model, DATA[0]).backward()
    release.remove()


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, faststep.amp.GradScaler])
def test_a_scaler_is_refused(scaler_class: Any) -> None:
    model = make_model()
    optimizer = MAKE["SGD"](model.parameters())
    release = faststep.release_gradients(model, optimizer)
    scaler = scaler_class("cpu", init_scale=2.0)
    scaler.scale(loss_of(model, DATA[0])).backward()
    with pytest.raises(RuntimeError, match="cannot skip a step for an overflow"):
        scaler.step(optimizer)
    release.remove()


def test_what_is_refused() -> None:
    model = make_model()
    optimizer = MAKE["SGD"](model.parameters())
    with pytest.raises(TypeError, match=r"not torch\.optim\.sgd\.SGD"):
        faststep.release_gradients(model, torch.optim.SGD(model.parameters()))

    class OwnStep(faststep.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise NotImplementedError

    with pytest.raises(TypeError, match=r"pass by OwnStep\.step\(\)"):
        faststep.release_gradients(model, OwnStep(model.parameters()))
    with pytest.raises(TypeError, match="model must be"):
        faststep.release_gradients(5, optimizer)
    with pytest.raises(ValueError, match="not 'norm'"):
        faststep.release_gradients(model, optimizer, clip="norm")
    accum = faststep.accumulate(optimizer, 2)
    with pytest.raises(RuntimeError, match="are accumulated"):
        faststep.release_gradients(model, optimizer)
    accum.remove()
    release = faststep.release_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match="released already"):
        faststep.release_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match="are released"):
        faststep.accumulate(optimizer, 2)
    release.remove()


def test_states_are_made_at_once_where_zeros_mean_none() -> None:
    model = make_model()
    for make, count in (("AdamW", 6), ("momentum", 6), ("SGD", 0)):
        optimizer = MAKE[make](model.parameters())
        release = faststep.release_gradients(model, optimizer)
        assert len(optimizer.state) == count
        assert not any(value.any() for value in states(optimizer))
        release.remove()
    damped = faststep.optim.SGD(model.parameters(), momentum=0.9, dampening=0.5)
    release = faststep.release_gradients(model, damped)
    assert not damped.state
    release.remove()


def test_a_release_that_fails_leaves_nothing() -> None:
    model = make_model()
    optimizer = MAKE["AdamW"](model.parameters(), differentiable=True)
    with pytest.raises(RuntimeError, match="differentiable=True"):
        faststep.release_gradients(model, optimizer)
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_errors_name_the_parameter() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = faststep.optim.Lion(model.parameters())
    release = faststep.release_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match="parameter 0 in group 0"):
        model(torch.tensor([1])).sum().backward()
    release.remove()


def test_sparse_gradients_are_for_torchs_class() -> None:
    results = []
    for cls in (torch.optim.SGD, faststep.optim.SGD):
        torch.manual_seed(0)
        model = nn.Embedding(4, 2, sparse=True)
        optimizer = cls(model.parameters(), lr=0.1, momentum=0.9)
        if cls is faststep.optim.SGD:
            faststep.release_gradients(model, optimizer)
        for at in (1, 2):
            model(torch.tensor([1, at])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(values(model))
    torch.testing.assert_close(*results)


def test_state_dict_parameters_added_and_unfrozen() -> None:
    model = make_model()
    model[4].requires_grad_(False)
    optimizer = MAKE["momentum"](model[:4].parameters())
    release = faststep.release_gradients(model, optimizer)
    loss_of(model, DATA[0]).backward()
    optimizer.step()
    before = values(model[4])
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": model[4].parameters()})
    model[4].requires_grad_(True)
    optimizer.step()
    loss_of(model, DATA[1]).backward()
    assert all(p.grad is None for p in model.parameters())
    assert not torch.equal(values(model[4])[0], before[0])
    release.remove()


def test_closures() -> None:
    model, reference = make_model(), make_model()
    optimizer, plain = MAKE["AdamW"](model.parameters()), MAKE["AdamW"](reference.parameters())
    release = faststep.release_gradients(model, optimizer)
    for m, o in ((model, optimizer), (reference, plain)):

        def closure(m: nn.Module = m, o: Any = o) -> Tensor:
            o.zero_grad()
            loss = loss_of(m, DATA[0])
            loss.backward()
            return loss

        for _ in range(2):
            o.step(closure)
    assert_equal(values(model), values(reference))
    release.remove()


@pytest.mark.parametrize("explicit", [True, False])
def test_nothing_is_left(explicit: bool) -> None:
    """After remove(), or when the release is dropped."""
    model = make_model()
    optimizer = MAKE["AdamW"](model.parameters())
    release = faststep.release_gradients(model, optimizer)
    loss_of(model, DATA[0]).backward()
    optimizer.step()
    dead = weakref.ref(release)
    if explicit:
        release.remove()
    del release
    gc.collect()
    assert dead() is None
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    loss_of(model, DATA[0]).backward()
    assert all(p.grad is not None for p in model.parameters())
    faststep.accumulate(optimizer, 2)


def test_learning_rates_on_devices_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of one on another device is a new tensor in each step."""
    model = make_model()
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
    rules_of = optimizer._rules

    def with_tensors(groups: Sequence[dict[str, Any]] = (), *found: Any) -> Any:
        lr = {0: torch.ones(2)}  # neither equal nor unequal
        return [rule._replace(lr=lr) for rule in rules_of(groups, *found)]

    monkeypatch.setattr(optimizer, "_rules", with_tensors)
    release = faststep.release_gradients(model, optimizer)
    loss_of(model, DATA[0]).backward()
    optimizer.step()
    release.remove()
