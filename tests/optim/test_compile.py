"""torch.compile around the model or around the whole step; closures that run several times."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .common import TOLERANCE, assert_near, assert_same_bits
from .declarations import ADAMW, ALL, SGD, Declaration

over_all = pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)


def build() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    return model, torch.randn(11, 5)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(  # one C function writes for all classes
    ("declaration", "backend"),
    [(ADAMW, "eager"), *((declaration, "aot_eager") for declaration in ALL)],
    ids=lambda value: getattr(value, "name", value),
)
def test_compiled_model(declaration: Declaration, backend: str) -> None:
    """The compiled model sees the new values after each step, without compiling again."""
    trajectories = []
    for compiled in (False, True):
        model, data = build()
        call = torch.compile(model, backend=backend) if compiled else model
        optimizer = declaration.ours(model.parameters(), **declaration.kwargs, max_grad_norm=1.0)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = call(data).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        trajectories.append((losses, list(model.parameters())))
    assert trajectories[0][0] == pytest.approx(trajectories[1][0], rel=1e-5)
    for p, q in zip(trajectories[0][1], trajectories[1][1], strict=True):
        assert_near(p, q, TOLERANCE, backend)


@pytest.mark.parametrize("declaration", [ADAMW, SGD], ids=lambda d: d.name)
def test_compiled_training_step(declaration: Declaration) -> None:
    """A compiled function that contains the step breaks its graph there and is right."""
    results = []
    for compiled in (False, True):
        model, data = build()
        optimizer = declaration.ours(model.parameters(), **declaration.kwargs)

        def train_step(model: Any = model, data: Any = data, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        call: Callable[[], Any] = train_step
        if compiled:
            call = torch.compile(train_step, backend="eager")
        losses = [call().item() for _ in range(4)]
        results.append((losses, list(model.parameters())))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert results[0][0][0] > results[0][0][-1]
    for p, q in zip(results[0][1], results[1][1], strict=True):
        assert_near(p, q, TOLERANCE, "compiled step")


@over_all
def test_closure_that_runs_many_times(declaration: Declaration) -> None:
    """A line search as LBFGS does it: the gradients that count are those of the last call."""
    model, data = build()
    searched = declaration.ours(model.parameters(), **declaration.kwargs)
    other, _ = build()
    plain = declaration.ours(other.parameters(), **declaration.kwargs)

    def loss_of(net: torch.nn.Module, factor: float) -> torch.Tensor:
        loss = factor * net(data).square().mean()
        for p in net.parameters():
            p.grad = None
        loss.backward()
        return loss

    calls: list[float] = []

    def closure() -> torch.Tensor:
        for factor in (4.0, 2.0, 1.0):
            loss = loss_of(model, factor)
            calls.append(factor)
        return loss

    for _ in range(3):
        returned = searched.step(closure)
        expected = loss_of(other, 1.0)
        plain.step()
        assert returned.item() == expected.item()
    assert calls == [4.0, 2.0, 1.0] * 3
    assert_same_bits(model.parameters(), other.parameters(), "closure")


@over_all
def test_closure_that_raises(declaration: Declaration) -> None:
    model, data = build()
    optimizer = declaration.ours(model.parameters(), **declaration.kwargs)
    model(data).sum().backward()
    starts = [p.detach().clone() for p in model.parameters()]

    def closure() -> float:
        raise KeyError("from the closure")

    with pytest.raises(KeyError, match="from the closure"):
        optimizer.step(closure)
    assert_same_bits(model.parameters(), starts, "after a closure that raised")


@over_all
def test_closure_that_freezes_a_layer(declaration: Declaration) -> None:
    """What the closure does to the gradients counts, also when it drops some of them."""
    model, data = build()
    first, _, second, _ = model.parameters()
    optimizer = declaration.ours(model.parameters(), **declaration.kwargs)

    def closure(drop: bool) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            if drop:
                first.grad = None
            return loss

        return run

    optimizer.step(closure(False))
    kept, moved = first.detach().clone(), second.detach().clone()
    optimizer.step(closure(True))
    assert torch.equal(first, kept)
    assert not torch.equal(second, moved)
