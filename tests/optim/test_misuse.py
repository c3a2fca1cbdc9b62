"""Misuse: autograd still catches it, errors name the parameter, and nothing is half-updated."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from .common import (
    Snapshot,
    assert_same_bits,
    outcome,
    parameters,
    set_gradients,
    state_tensors,
    train,
)
from .declarations import ADAGRAD, ALL, OTHERS, SGD, TORCHS, Declaration

over_all = pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
over_torchs = pytest.mark.parametrize("declaration", TORCHS, ids=lambda d: d.name)
MODIFIED = "modified by an inplace operation"


class Wrapper(Tensor):
    """A tensor that holds another one and intercepts every operator, as DTensor does."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        result = func(*map(unwrap, args), **(kwargs or {}))
        return cls(result) if isinstance(result, Tensor) else result


class Tagged(Parameter):
    """A subclass that adds an attribute and changes no operator: an ordinary parameter."""


@over_all
def test_step_between_forward_and_backward(declaration: Declaration) -> None:
    """The step bumps the parameters' versions, so autograd refuses the stale graph."""
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    params = [*first.parameters(), *second.parameters()]
    optimizer = declaration.ours(params, **declaration.kwargs)
    set_gradients(params, 0)
    loss = second(first(torch.ones(2, 3))).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


@over_all
def test_versions_move_only_with_the_values(declaration: Declaration) -> None:
    """A skipped parameter's graph stays valid; so does everything after a skipped step."""
    params = parameters((3,), (3,))
    optimizer = declaration.ours(params, **declaration.kwargs)
    loss = (params[0] * params[0]).sum()
    set_gradients(params[1:], 0)
    optimizer.step()
    assert params[1]._version > 0
    optimizer.found_inf = torch.tensor(1.0)
    set_gradients(params, 1)
    versions = [p._version for p in params]
    optimizer.step()
    assert [p._version for p in params] == versions
    params[0].grad = None
    loss.backward()
    torch.testing.assert_close(params[0].grad, 2 * params[0].detach())


@over_all
def test_versions_of_written_gradients(declaration: Declaration) -> None:
    """A graph that saved a gradient (double backward) notices that the step wrote into it."""
    params = parameters((3,))
    optimizer = declaration.ours(params, max_grad_norm=0.1, keep_grads=True)
    set_gradients(params, 0)
    other = torch.ones(3, requires_grad=True)
    loss = (params[0].grad * other).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


@over_torchs
def test_versions_of_states(declaration: Declaration) -> None:
    """A penalty weighted by a moment saves that moment: as in torch the next step spoils it."""
    for cls in (declaration.ours, declaration.torchs):
        params = parameters((3,))
        optimizer = cls(params, **declaration.kwargs)
        train(optimizer, params)
        group = optimizer.param_groups[0]
        for key in declaration.moments(group):
            other = torch.ones(3, requires_grad=True)
            loss = (optimizer.state[params[0]][key] * other).sum()
            train(optimizer, params, seed=1)
            with pytest.raises(RuntimeError, match=MODIFIED):
                loss.backward()


@pytest.mark.parametrize(
    "declaration", [d for d in ALL + OTHERS if d not in (ADAGRAD, SGD)], ids=lambda d: d.name
)
def test_sparse_gradient(declaration: Declaration) -> None:
    """torch's error where torch has the class; nothing is touched before."""
    dense, sparse = parameters((4, 3), (4, 3))
    optimizer = declaration.ours([dense, sparse], **declaration.kwargs)
    set_gradients([dense, sparse], 0)
    sparse.grad = torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 3), (4, 3), check_invariants=True)
    before = Snapshot(optimizer)
    error, text, _ = outcome(optimizer.step)
    assert error is RuntimeError
    before.assert_unchanged()
    if declaration.torchs is None:
        assert "gradient of parameter 1 in group 0 (shape (4, 3)" in text
    else:
        assert outcome(declaration.torchs([sparse]).step)[:2] == (RuntimeError, text)


def adagrad_with_a_sparse_gradient(cls: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
    params = parameters((4, 3), (4, 3))
    optimizer = cls(params, lr=0.1, initial_accumulator_value=0.5, **kwargs)
    set_gradients(params, 0)
    rows = torch.ones(2, 3)
    params[1].grad = torch.sparse_coo_tensor([[0, 2]], rows, (4, 3), check_invariants=True)
    return optimizer, params


def test_adagrad_with_sparse_gradients_is_torchs() -> None:
    """Dense and sparse steps in turn; torch's loop would write a part before its error."""
    results = []
    for cls in (ADAGRAD.ours, ADAGRAD.torchs):
        optimizer, params = adagrad_with_a_sparse_gradient(cls)
        optimizer.step()
        train(optimizer, params, steps=2)
        results.append([*params, *state_tensors(optimizer)])
    for ours, torchs in zip(*results, strict=True):
        torch.testing.assert_close(ours, torchs)
    optimizer, params = adagrad_with_a_sparse_gradient(ADAGRAD.ours, weight_decay=0.1)
    before = Snapshot(optimizer)
    with pytest.raises(RuntimeError, match="weight_decay option is not compatible with sparse"):
        optimizer.step()
    before.assert_unchanged()


def complex_parameter() -> tuple[Tensor, Tensor]:
    value = torch.tensor([1.0 + 2.0j, 3.0 - 1.0j])
    return Parameter(value), value.clone()


def wrapper() -> tuple[Tensor, Tensor]:
    return Parameter(Wrapper(torch.ones(3))), Wrapper(torch.ones(3))


def wrapped_gradient() -> tuple[Tensor, Tensor]:
    return Parameter(torch.ones(3)), Wrapper(torch.ones(3))


def overlapping() -> tuple[Tensor, Tensor]:
    return Parameter(torch.ones(1).expand(5)), torch.ones(5)


UNUSABLE: tuple[Callable[[], tuple[Tensor, Tensor]], ...] = (
    complex_parameter,
    wrapper,
    wrapped_gradient,
    overlapping,
)


@pytest.mark.parametrize("make", UNUSABLE)
@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
@over_all
def test_unusable_tensor(declaration: Declaration, make: Any, named: bool) -> None:
    """An error with group, index, name, shape and dtype, before anything has moved."""
    if make is complex_parameter and declaration.torchs is not None:
        pytest.skip("torch's class makes the step")
    good, later = parameters((5,), (5,))
    bad, gradient = make()
    set_gradients([good, later], 0)
    bad.grad = gradient
    name = (lambda n, p: (n, p)) if named else (lambda n, p: p)
    optimizer = declaration.ours(
        [
            {"params": [name("good", good)]},
            {"params": [name("later", later), name("layer.bad", bad)]},
        ],
        **declaration.kwargs,
    )
    starts = [good.detach().clone(), later.detach().clone()]
    with pytest.raises((TypeError, RuntimeError)) as caught:
        optimizer.step()
    text = str(caught.value)
    assert "parameter 1 in group 1" in text
    assert str(tuple(bad.shape)) in text
    assert str(bad.dtype) in text
    assert ("layer.bad" in text) == named
    assert_same_bits([good, later], starts, "nothing may be half-updated")
    assert not any(optimizer.state.get(p) for p in (good, later))
    bad.grad = None
    optimizer.step()
    assert not torch.equal(good, starts[0]), "the optimizer goes on without the bad gradient"


def test_elements_that_share_memory() -> None:
    """Where any two may, nothing is updated; some strides are refused that happen not to meet."""
    source, refused = random.Random(0), 0
    for _ in range(1000):
        dims, memory = source.randint(1, 4), torch.zeros(512)
        shape = [source.randint(1, 4) for _ in range(dims)]
        strides = [source.randrange(40) for _ in range(dims)]
        param = Parameter(memory.as_strided(shape, strides))
        param.grad = torch.ones(shape)
        places = torch.arange(512).as_strided(shape, strides).unique().numel()
        try:
            SGD.ours([param], lr=1.0).step()
        except RuntimeError:
            refused += places == param.numel()
            assert not memory.any()
        else:
            assert places == param.numel()
            assert memory.sum() == -places
    assert refused < 250


@pytest.mark.parametrize("name", ["\u0416" * 150, "A" + "\u0416" * 150])
def test_a_name_that_is_too_long_for_the_error(name: str) -> None:
    """It is cut, also within a character of several bytes."""
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = SGD.ours([param], lr=0.1, momentum=0.9)
    optimizer.step()
    dispatch = classmethod(lambda *_: NotImplemented)
    kind = type(name, (Tensor,), {"__torch_dispatch__": dispatch})
    optimizer.state[param]["momentum_buffer"] = torch.ones(3).as_subclass(kind)
    with pytest.raises(TypeError, match=f"momentum_buffer.* is a {name[:90]}"):
        optimizer.step()


@over_all
def test_plain_subclass_of_parameter(declaration: Declaration) -> None:
    tagged = [Tagged(p.detach().clone()) for p in parameters((5,), (2, 3))]
    plain = parameters((5,), (2, 3))
    train(declaration.ours(tagged, **declaration.kwargs), tagged, steps=2)
    train(declaration.ours(plain, **declaration.kwargs), plain, steps=2)
    assert_same_bits(tagged, plain, "a subclass without operators of its own")


STATES = [(d, key) for d in ALL for key in (*d.state, *d.flags) if key != "step"]
WRONG: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda t: torch.zeros(7),
    "view": lambda t: t.detach().reshape(-1),
    "fewer_elements": lambda t: t[:1].clone(),
    "integer": lambda t: t.to(torch.int32),
    "complex": lambda t: t.to(torch.complex64),
    "sparse": lambda t: t.to_sparse(),
    "number": lambda t: 1.0,
    "wrapper": lambda t: Wrapper(t),
    "expanded": lambda t: t[:1, :1].expand(t.shape),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("declaration", "key"), STATES, ids=lambda v: getattr(v, "name", v))
def test_state_replaced_by_something_else(declaration: Declaration, key: str, wrong: str) -> None:
    """The error names the state and the parameter, and no other parameter has moved."""
    params = parameters((6,), (4, 3))
    optimizer = declaration.ours(params, **{"amsgrad": True} if "amsgrad" in key else {})
    if key == "momentum_buffer":
        optimizer = declaration.ours(params, momentum=0.9)
    if key == "max_exp_avg_sq":
        optimizer = declaration.ours(params, amsgrad=True)
    train(optimizer, params, steps=2)
    set_gradients(params, 2)
    kept = optimizer.state[params[1]][key]
    optimizer.state[params[1]][key] = WRONG[wrong](kept)
    before = Snapshot(optimizer) if wrong not in ("sparse", "wrapper", "number") else None
    starts = [p.detach().clone() for p in params]
    with pytest.raises((TypeError, RuntimeError)) as caught:
        optimizer.step()
    if (declaration, wrong) == (SGD, "sparse"):  # torch's sparse steps make such buffers
        assert "add(sparse, dense) is not supported" in str(caught.value)
    else:
        assert key in str(caught.value)
        assert "parameter 1 in group 0" in str(caught.value)
    assert_same_bits(params, starts, "parameters")
    if before is not None:
        before.assert_unchanged()
    optimizer.state[params[1]][key] = kept
    optimizer.step()
    assert not torch.equal(params[0], starts[0])


@pytest.mark.parametrize("declaration", [ALL[0], ALL[1]], ids=lambda d: d.name)
@pytest.mark.parametrize(
    "step",
    [3, 3.0, None, torch.ones(2), torch.ones((), dtype=torch.bool)],
    ids=["int", "float", "none", "two", "bool"],
)
def test_step_replaced_by_something_else(declaration: Declaration, step: Any) -> None:
    params = parameters((6,), (4, 3))
    optimizer = declaration.ours(params, **declaration.kwargs)
    train(optimizer, params, steps=2)
    optimizer.state[params[1]]["step"] = step
    starts = [p.detach().clone() for p in params]
    with pytest.raises((TypeError, RuntimeError), match=r"step' of parameter 1 in group 0"):
        optimizer.step()
    assert_same_bits(params, starts, "parameters")
    assert optimizer.state[params[0]]["step"].item() == 2.0


@over_all
def test_error_at_the_first_step_leaves_no_state(declaration: Declaration) -> None:
    """A step that fails after states were created must still be the first one when repeated."""
    params, expected = parameters((5,)), parameters((5,))
    optimizer = declaration.ours(params, **declaration.kwargs)
    set_gradients(params, 0)
    optimizer.grad_scale = torch.ones(2)
    with pytest.raises((TypeError, RuntimeError), match="grad_scale"):
        optimizer.step()
    del optimizer.grad_scale
    train(optimizer, params, steps=2)
    train(declaration.ours(expected, **declaration.kwargs), expected, steps=2)
    assert_same_bits(params, expected, "the repeated first step")
