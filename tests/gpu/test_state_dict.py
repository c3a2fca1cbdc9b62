"""State dicts on the device, to and from torch's fused optimizers."""

import copy
from typing import Any

import pytest
import torch

from optim.declarations import TORCHS, Declaration

from .common import CUDA, place, same_bits, values

SHAPES = ((40, 5), (257,))


def fresh() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(place(values(s, i), CUDA)) for i, s in enumerate(SHAPES)]


def train(optimizer: Any, params: list[torch.nn.Parameter], first: int, steps: int) -> None:
    for step in range(first, first + steps):
        for i, p in enumerate(params):
            p.grad = place(values(tuple(p.shape), 100 * step + i), CUDA)
        optimizer.step()


def continued(source: Any, params: list[torch.nn.Parameter], make: Any, **kwargs: Any) -> Any:
    """(parameters, optimizer) that go on where a saved run stopped."""
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer = make(copies, **kwargs)
    optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    return copies, optimizer


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("to_ours", [True, False], ids=["from_torch", "to_torch"])
@pytest.mark.parametrize("declaration", TORCHS, ids=lambda d: d.name)
def test_to_and_from_torch(
    declaration: Declaration, to_ours: bool, options: dict[str, Any]
) -> None:
    ours, theirs = declaration.ours, declaration.torchs
    params = fresh()
    first = (theirs if to_ours else ours)(params, **declaration.kwargs, **options)
    train(first, params, 0, 3)
    target = ours if to_ours else theirs
    copies, second = continued(first, params, target, **declaration.kwargs, **options)
    for p, q in zip(params, copies, strict=True):
        for key, value in first.state[p].items():
            if value is not None:
                assert same_bits(value.cpu(), second.state[q][key].cpu()), key
    train(first, params, 3, 3)
    train(second, copies, 3, 3)
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach().cpu())


@pytest.mark.parametrize("declaration", TORCHS, ids=lambda d: d.name)
def test_continues_from_its_own(declaration: Declaration) -> None:
    params = fresh()
    first = declaration.ours(params, **declaration.kwargs)
    train(first, params, 0, 3)
    copies, second = continued(first, params, declaration.ours, **declaration.kwargs)
    train(first, params, 3, 3)
    train(second, copies, 3, 3)
    for p, q in zip(params, copies, strict=True):
        assert same_bits(p.cpu(), q.cpu())


def test_step_lies_where_torch_keeps_it() -> None:
    for options in ({}, {"fused": True}, {"capturable": True}, {"foreach": True}):
        saved = []
        for make in (TORCHS[0].ours, TORCHS[0].torchs):
            params = fresh()
            optimizer = make(params, **options)
            train(optimizer, params, 0, 2)
            saved.append(optimizer.state_dict()["state"][0]["step"])
        assert saved[0].device == saved[1].device, options
        assert saved[0].dtype == saved[1].dtype
        assert same_bits(saved[0].cpu(), saved[1].cpu())
