"""What the clip functions accept as torch does, and what they leave to torch."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import faststep.clip as ours
from compare import assert_same_tensors, outcome
from gradients import exact_norm, grads_of, params_with

torchs = torch.nn.utils


def test_foreach_on_a_device_without_it_is_torchs_error() -> None:
    param = Parameter(torch.ones(2, device="meta"))
    param.grad = torch.ones(2, device="meta")
    for call in (
        lambda m: m.clip_grad_norm_(param, 1.0, foreach=True),
        lambda m: m.get_total_norm(param.grad, foreach=True),
        lambda m: m.clip_grad_value_(param, 1.0, foreach=True),
    ):
        mine, their = outcome(partial(call, ours)), outcome(partial(call, torchs))
        assert mine == their
        assert mine[1:] == (
            RuntimeError,
            "foreach=True was passed, but can't use the foreach API on meta tensors",
        )


class Intercepting(Tensor):
    """A tensor class of the user that sees every operator."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


FOREIGN: dict[str, Callable[[], Tensor]] = {
    "complex": lambda: torch.tensor([3.0 + 4.0j, 1.0j]),
    "sparse": lambda: torch.sparse_coo_tensor([[0]], [2.0], (2,), check_invariants=True),
    "subclass": lambda: torch.tensor([3.0, 4.0]).as_subclass(Intercepting),
    "conjugate": lambda: torch.tensor([3.0 + 4.0j, 1.0j]).conj(),
    "meta": lambda: torch.ones(2, device="meta"),
}


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("kind", FOREIGN)
def test_gradients_that_are_not_ours_take_torchs_way(kind: str, foreach: bool | None) -> None:
    results = []
    for module in (ours, torchs):
        grad = FOREIGN[kind]()
        param = Parameter(torch.empty_like(grad, requires_grad=False))
        param.grad = grad
        with_plain = [param, *params_with([torch.ones(3)])]
        if kind == "meta":
            with_plain.pop()
        parts = [
            outcome(partial(module.clip_grad_norm_, with_plain, 0.5, foreach=foreach)),
            outcome(partial(module.clip_grad_value_, with_plain, 0.2, foreach=foreach)),
            outcome(
                partial(module.clip_grads_with_norm_, with_plain, 0.1, torch.tensor(1.0), foreach)
            ),
            outcome(partial(module.get_total_norm, grads_of(with_plain), foreach=foreach)),
        ]
        results.append((parts, grads_of(with_plain)))
    (mine, my_grads), (their, their_grads) = results
    for a, b in zip(mine, their, strict=True):
        if a[0] == "error" or not isinstance(a[1], Tensor):
            assert a == b
        else:
            assert type(a[1]) is type(b[1])
            torch.testing.assert_close(a[1], b[1])
    torch.testing.assert_close(my_grads, their_grads, rtol=0, atol=0)


def test_our_functions_in_torchs_place_do_not_call_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ours.__all__:
        monkeypatch.setattr(torchs, name, getattr(ours, name))
    param = Parameter(torch.tensor([1j, 0j]))
    param.grad = torch.tensor([3.0 + 4.0j, 0j])
    assert torchs.clip_grad_norm_(param, 1.0) == 5.0
    torch.testing.assert_close(param.grad, torch.tensor([0.6 + 0.8j, 0j]))


def test_inside_a_compiled_graph_torchs_function_is_traced() -> None:
    """In one graph, where this torch traces its own into one."""
    grad = torch.tensor([3.0, 4.0])

    def outcome_of(module: Any) -> object:
        def clip(grad: Tensor) -> Tensor:
            return grad * 1.0 / module.get_total_norm([grad * 2.0])

        try:
            return torch.compile(clip, backend="eager", fullgraph=True)(grad).tolist()
        except Exception as error:
            return type(error)

    assert outcome_of(ours) == outcome_of(torchs)

    def clip(grad: Tensor) -> Tensor:
        return grad * 1.0 / ours.get_total_norm([grad * 2.0])

    torch.testing.assert_close(torch.compile(clip, backend="eager")(grad), grad / 10.0)


def test_a_clip_between_backward_and_step_of_a_compiled_model() -> None:
    model = torch.compile(torch.nn.Linear(3, 2), backend="eager")
    model(torch.ones(4, 3)).sum().backward()
    exact = exact_norm([p.grad for p in model.parameters()], 2.0)
    assert float(ours.clip_grad_norm_(model.parameters(), 0.5)) == pytest.approx(exact, rel=1e-6)
    assert exact_norm([p.grad for p in model.parameters()], 2.0) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("params", [[], [Parameter(torch.ones(2))]], ids=["empty", "no grads"])
def test_without_gradients(params: list[Parameter], dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    assert_same_tensors([ours.clip_grad_norm_(params, 1.0)], [torch.tensor(0.0)])
    assert_same_tensors([ours.get_total_norm([])], [torch.tensor(0.0)])
    total = torch.tensor(1.0)
    assert ours.clip_grads_with_norm_(params, 1.0, total) is None
    mine, their = (outcome(partial(m.clip_grad_value_, params, 1.0)) for m in (ours, torchs))
    assert mine == their


def test_an_empty_generator_warns_at_the_callers_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.clip_grad_norm_((p for p in []), 1.0)
        torchs.clip_grad_norm_((p for p in []), 1.0)
    mine, their = caught
    assert (mine.category, str(mine.message)) == (their.category, str(their.message))
    assert mine.filename == their.filename == __file__


@pytest.mark.parametrize("foreach", [None, True, False])
def test_foreach_changes_nothing(foreach: bool | None) -> None:
    (param,) = params_with([torch.tensor([3.0, 4.0])])
    norm = ours.clip_grad_norm_(param, 1.0, foreach=foreach)
    assert norm == ours.get_total_norm(torch.tensor([3.0, 4.0]), foreach=foreach) == 5.0
    ours.clip_grads_with_norm_(param, 1.0, torch.tensor(2.0), foreach=foreach)
    ours.clip_grad_value_(param, 0.35, foreach=foreach)
    torch.testing.assert_close(param.grad, torch.tensor([0.3, 0.35]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", [list, tuple, iter, lambda ps: (p for p in ps)])
def test_any_iterable_of_parameters(kind: Callable[[list[Parameter]], Any]) -> None:
    params = [*params_with([torch.tensor([3.0]), torch.tensor([4.0])]), Parameter(torch.ones(2))]
    assert ours.clip_grad_norm_(kind(params), 1.0) == 5.0
    ours.clip_grad_value_(kind(params), 0.5)
    ours.clip_grads_with_norm_(kind(params), 1.0, torch.tensor(2.0))
    expected = [torch.tensor([0.25]), torch.tensor([0.25])]
    torch.testing.assert_close(grads_of(params), expected)
    assert params[2].grad is None
    assert float(ours.get_total_norm(kind(grads_of(params)))) == pytest.approx(0.125**0.5)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_a_gradient_whose_elements_share_memory_is_torchs_error(
    name: str, foreach: bool | None
) -> None:
    results = []
    for module in (ours, torchs):
        (param,) = params_with([torch.ones(1)])
        wide = Parameter(torch.ones(4))
        wide.grad = torch.ones(1).expand(4)
        call = partial(getattr(module, name), [param, wide], 0.5, foreach=foreach)
        results.append(outcome(call))
        assert wide.grad.tolist() == [1.0] * 4
    assert results[0] == results[1]
    assert results[0][1] is RuntimeError
    assert ours.get_total_norm(wide.grad) == 2.0
