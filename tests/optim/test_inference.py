"""Tensors made in inference mode are written there only, as torch has it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

import faststep

from .common import TOLERANCE, Snapshot, assert_near, parameters, records, set_gradients
from .declarations import ALL, TORCHS, Declaration

SHAPES = ((5,), (4, 3))

over_those_with_states = pytest.mark.parametrize(
    "declaration", [d for d in ALL if d.state or d.flags], ids=lambda d: d.name
)
over_torchs = pytest.mark.parametrize("declaration", TORCHS, ids=lambda d: d.name)


@pytest.mark.parametrize("known", [True, False])
@over_those_with_states
def test_states_of_a_step_in_inference_mode(declaration: Declaration, known: bool) -> None:
    with records(known):
        params = parameters(*SHAPES)
        optimizer = declaration.ours(params, **declaration.kwargs)
        set_gradients(params[:1], 0)
        optimizer.step()
        set_gradients(params, 1)
        with torch.inference_mode():
            optimizer.step()
            optimizer.step()
        before = Snapshot(optimizer)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"state.* of parameter 1 in group 0 .*inference"
            ):
                optimizer.step()
            before.assert_unchanged()
        with torch.inference_mode():
            optimizer.step()
        state = optimizer.state[params[1]]
        state.update({key: value.clone() for key, value in state.items()})
        optimizer.step()


@over_torchs
def test_each_case_as_torch(declaration: Declaration) -> None:
    def state(cls: Any) -> Any:
        params = parameters(*SHAPES)
        optimizer = cls(params, **declaration.kwargs)
        set_gradients(params, 0)
        with torch.inference_mode():
            optimizer.step()
        return optimizer

    def parameter(cls: Any) -> Any:
        with torch.inference_mode():
            param = Parameter(torch.ones(3), requires_grad=False)
            param.grad = torch.ones(3)
        return cls([param], **declaration.kwargs)

    def gradient(cls: Any) -> Any:
        params = parameters(*SHAPES)
        with torch.inference_mode():
            set_gradients(params, 0)
        return cls(params, **declaration.kwargs)

    for made in (state, parameter, gradient):
        results = []
        for cls in (declaration.torchs, declaration.ours):
            optimizer = made(cls)
            try:
                optimizer.step()
                error = None
            except Exception as caught:
                error = type(caught)
            results.append((error, [p.detach() for p in optimizer.param_groups[0]["params"]]))
        (their_error, theirs), (error, ours) = results
        assert error is their_error, made.__name__
        for mine, other in zip(ours, theirs, strict=True):
            if error is None:
                assert_near(mine, other, TOLERANCE, made.__name__)


@pytest.mark.parametrize("known", [True, False])
def test_counter_of_inference_mode(known: bool) -> None:
    """The one state that is written although its version does not move."""
    with records(known):
        for cls in (torch.optim.AdamW, faststep.optim.AdamW):
            params = parameters(*SHAPES)
            optimizer = cls(params, lr=0.1)
            for seed in range(4):
                set_gradients(params, seed)
                optimizer.step()
            with torch.inference_mode():
                optimizer.state[params[1]]["step"] = torch.tensor(4.0)
                for _ in range(3):
                    optimizer.step()
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"(?i)inference"):
                    optimizer.step()
            if cls is faststep.optim.AdamW:  # torch has counted, and only then raises
                assert optimizer.state[params[1]]["step"] == 7.0
            optimizer.state[params[1]]["step"] = torch.tensor(7.0)
            optimizer.step()


class _AtTheCheck(TorchFunctionMode):
    """Does something once, when a step asks whether a tensor is one of inference mode."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.action: Callable[[], object] | None = action

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.action is not None and getattr(func, "__name__", "") == "is_inference":
            action, self.action = self.action, None
            action()
        return func(*args, **(kwargs or {}))


@records(False)
@pytest.mark.parametrize("change", ["gradient", "no gradient", "state", "parameter"])
def test_what_the_check_replaces_is_found_again(change: str) -> None:
    """A step without torch's records asks about every tensor, which runs the script's mode."""
    p, q = (Parameter(torch.full((4,), value)) for value in (1.0, 7.0))
    p.grad, q.grad = torch.ones(4), torch.ones(4)
    optimizer = faststep.optim.Adam([p], lr=0.1)
    optimizer.step()
    params = optimizer.param_groups[0]["params"]
    actions: dict[str, Callable[[], object]] = {
        "gradient": lambda: setattr(p, "grad", torch.full((4,), -9.0)),
        "no gradient": lambda: setattr(p, "grad", None),
        "state": lambda: optimizer.state.pop(p),
        "parameter": lambda: params.__setitem__(0, q),
    }
    mode = _AtTheCheck(actions[change])
    with mode:
        optimizer.step()
    assert mode.action is None
    found = []
    for one in (p, q):
        state = optimizer.state.get(one)
        average = state and round(float(state["exp_avg"][0]), 4)
        found.append((round(float(one[0].detach()), 2), average, state and float(state["step"])))
    assert (
        found
        == {
            "gradient": [(0.97, -0.81, 2.0), (7.0, None, None)],
            "no gradient": [(0.9, 0.1, 1.0), (7.0, None, None)],
            "state": [(0.8, 0.1, 1.0), (7.0, None, None)],
            "parameter": [(0.9, 0.1, 1.0), (6.9, 0.1, 1.0)],
        }[change]
    )
