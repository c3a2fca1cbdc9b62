"""Models on which something acts in the middle of a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import faststep

COUNT, SIZE, LR = 60, 64, 0.5
POISON = -(2.0**20)  # what memory that was freed too early holds
Action = Callable[[], None]


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
    return _stepped(with_states())


def _stepped(model: Model) -> Model:
    """After some steps, with parameters and states of zeros."""
    for _ in range(3):
        model.backward()
        model.optimizer.step()
    with torch.no_grad():
        for p in model.params:
            p.zero_()
            model.optimizer.state[p]["momentum_buffer"].zero_()
    return model


def bound_again() -> Model:
    """As the last, but for one state, so that the next step binds everything again."""
    model = alike()
    model.optimizer.state[model.params[-1]]["momentum_buffer"] = torch.zeros(SIZE)
    return model


class _Long(Model):
    """A model with so many elements that a step releases the GIL."""

    def __init__(self) -> None:
        super().__init__(momentum=0.5)
        self.large = Parameter(torch.zeros(1 << 20))
        self.optimizer.add_param_group({"params": [self.large]})

    def backward(self) -> None:
        super().backward()
        self.large.grad = torch.ones(1 << 20)


def long_alike() -> Model:
    """The next step is like the ones before, and a long one."""
    return _stepped(_Long())


def step(model: Model, action: Callable[[Model], None]) -> None:
    """A step in the middle of which the parameters may go."""
    if action is clear_groups:
        with pytest.raises(RuntimeError, match="group 0 were changed"):
            model.optimizer.step()
    else:
        model.optimizer.step()
