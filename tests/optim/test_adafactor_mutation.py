"""What scripts do to tensors between steps: Adafactor must see it where it recognizes tensors."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from faststep.optim import Adafactor

from . import common
from .common import assert_same_bits, outcome, parameters, set_gradients, train
from .test_mutation import CHANGES, LONG, SHAPES, Change


@pytest.fixture(params=[True, False], ids=["records", "no records"])
def records(request: pytest.FixtureRequest) -> Iterator[None]:
    with common.records(request.param):
        yield


@pytest.mark.parametrize("shapes", [SHAPES, (*SHAPES, LONG)], ids=["short", "long"])
@pytest.mark.usefixtures("records")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_between_steps(change: Change, shapes: tuple[tuple[int, ...], ...]) -> None:
    """The same as torch's at every parameter, or an error of the same type."""
    results: list[Any] = []
    for cls in (Adafactor, torch.optim.Adafactor):
        params = parameters(*shapes)
        optimizer = cls(params)
        train(optimizer, params, steps=3)  # enough to recognize tensors by their records
        change(optimizer, params)
        result = outcome(lambda o=optimizer, p=params: train(o, p, steps=3, seed=2))
        results.append((params, result[0]))
    (ours, our_result), (theirs, their_result) = results
    assert our_result == their_result
    if change.__name__ == "exchange_states":  # shapes that do not fit
        assert our_result is RuntimeError
        return
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6 if shapes == SHAPES else 1e-4)


def _transposed(grad: Tensor) -> Tensor:
    return grad.t().contiguous().t()


def _offset(grad: Tensor) -> Tensor:
    return torch.cat([torch.zeros(3), grad.flatten()])[3:].view(grad.shape)


def _negated(grad: Tensor) -> Tensor:
    return torch._neg_view(-grad)


def _spaced(grad: Tensor) -> Tensor:
    return torch.stack([grad, grad], -1)[..., 1]


GRADS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.clone,
    _transposed,
    _offset,
    _negated,
    _spaced,
    torch.clone,
)


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize("shape", [(17,), (4, 5), (70, 80)])
def test_gradients_of_every_form_in_turn(shape: tuple[int, ...]) -> None:
    """Bit for bit what a step with the plain gradient does."""
    (ours,), (plain,) = parameters(shape), parameters(shape)
    pair = Adafactor([ours]), Adafactor([plain])
    kept = []
    for step, form in enumerate(GRADS * 3):
        set_gradients([ours, plain][:1], step)
        grad = ours.grad
        assert grad is not None
        plain.grad = grad.clone()
        if len(shape) > 1 or form is not _transposed:
            ours.grad = form(grad)
        kept.append(ours.grad)  # so that no address comes again
        for optimizer in pair:
            optimizer.step()
        assert_same_bits([ours], [plain], form.__name__)


@pytest.mark.usefixtures("records")
def test_two_optimizers_in_turn() -> None:
    """What is known of one's tensors is not taken for the other's."""
    runs = []
    for turns in (1, 2):
        sets = [parameters((17,), (4, 5)), parameters((17,), (4, 5), seed=9)]
        optimizers = [Adafactor(params) for params in sets]
        for step in range(4 if turns == 1 else 8):
            which = step % 2 if turns == 2 else None
            for index, (params, optimizer) in enumerate(zip(sets, optimizers, strict=True)):
                if which in (None, index):
                    set_gradients(params, step // turns)
                    optimizer.step()
        runs.append([*sets[0], *sets[1]])
    assert_same_bits(*runs, "two optimizers")


def test_a_parameter_that_becomes_another_kind_of_tensor() -> None:
    """The same object, with data of another dtype and gradients that fit."""
    results = []
    for cls in (Adafactor, torch.optim.Adafactor):
        param = Parameter(torch.linspace(-1, 1, 20).view(4, 5))
        optimizer = cls([param])
        train(optimizer, [param], steps=3)
        param.grad = None
        param.data = param.data.double()
        for state in optimizer.state.values():
            state.update({key: value.double() for key, value in state.items() if key != "step"})
        train(optimizer, [param], steps=2)
        results.append(param)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
