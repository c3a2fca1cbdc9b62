"""Random sequences of steps and of what scripts do between them: no stale pointer survives."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from faststep.optim.base import FusedOptimizer

from . import test_mutation as mutation
from .common import TOLERANCE, assert_near, parameters, set_gradients
from .declarations import TORCHS, Declaration

Optimizer = torch.optim.Optimizer


def drop_gradients(optimizer: Optimizer, params: list[Parameter]) -> None:
    """Frees the gradients; others take their memory."""
    optimizer.zero_grad()


def drop_one_gradient(optimizer: Optimizer, params: list[Parameter]) -> None:
    params[1].grad = None


def reload(optimizer: Optimizer, params: list[Parameter]) -> None:
    """New state tensors and new group dictionaries."""
    copies = {
        index: {key: value.clone() for key, value in values.items()}
        for index, values in optimizer.state_dict()["state"].items()
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": copies})


def skip(optimizer: Optimizer, params: list[Parameter]) -> None:
    """A step that the scaler skips; torch's for-loop knows none, so nothing happens there."""
    if isinstance(optimizer, FusedOptimizer):
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
        del optimizer.found_inf


def grow(optimizer: Optimizer, params: list[Parameter]) -> None:
    params.append(parameters((len(params), 3), seed=len(params))[0])
    optimizer.add_param_group({"params": params[-1:], "lr": 0.02})


def fresh_parameter_object(optimizer: Optimizer, params: list[Parameter]) -> None:
    """The old Parameter dies, and the new one may be given its address."""
    group = next(g for g in optimizer.param_groups if any(p is params[1] for p in g["params"]))
    place = next(i for i, p in enumerate(group["params"]) if p is params[1])
    state = optimizer.state.pop(params[1], None)
    group["params"][place] = params[1] = Parameter(params[1].detach().clone())
    if state is not None:
        optimizer.state[params[1]] = state


CHANGES = (
    mutation.replace_data,
    mutation.replace_data_with_other_strides,
    mutation.set_storage,
    mutation.copy_into,
    mutation.move_states,
    mutation.restride_states,
    mutation.clear_state,
    mutation.edit_group,
    mutation.reverse_params,
    mutation.exchange_param,
    drop_gradients,
    drop_one_gradient,
    reload,
    skip,
    grow,
    fresh_parameter_object,
)


def run(declaration: Declaration, cls: Any, script: list[Any], **kwargs: Any) -> list[Parameter]:
    """Alternates steps, with new gradients or the old ones, and changes."""
    params = parameters((17,), (4, 5), ())
    optimizer = cls(params[:], **declaration.kwargs, **kwargs)
    for step, (change, renew) in enumerate(script):
        if renew:
            set_gradients(params, step)
        if any(p.grad is not None for p in params):
            optimizer.step()
        if change is mutation.exchange_param:  # as there, but new each time
            optimizer.state.pop(params[1], None)
            params[1] = parameters((6, 7), seed=step)[0]
            optimizer.param_groups[0]["params"][1] = params[1]  # in the middle of three, always
        else:
            change(optimizer, params)
    set_gradients(params, 99)
    optimizer.step()
    return params


@given(
    declaration=st.sampled_from(TORCHS),
    script=st.lists(
        st.tuples(st.sampled_from(CHANGES), st.booleans()),
        min_size=1,
        max_size=8,
    ),
)
@settings(max_examples=150)
def test_any_sequence(declaration: Declaration, script: list[tuple[Any, bool]]) -> None:
    """Whatever happens between steps, the parameters end where torch's for-loop ends."""
    mine = run(declaration, declaration.ours, script)
    theirs = run(declaration, declaration.torchs, script, foreach=False)
    for p, q in zip(mine, theirs, strict=True):
        assert_near(p, q, TOLERANCE, "after the sequence")
