"""The other optimizers with gradients that are released in backward or accumulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import faststep

from .common import assert_same_bits
from .declarations import OTHERS, Declaration

over_others = pytest.mark.parametrize("declaration", OTHERS, ids=lambda d: d.name)


def twins() -> list[nn.Module]:
    torch.manual_seed(0)
    nets: list[nn.Module] = [nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))]
    nets.append(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    nets[1].load_state_dict(nets[0].state_dict())
    return nets


def loss_of(net: nn.Module, step: int) -> Any:
    return net(torch.full((2, 5), step - 1.3)).square().mean()


def compare(nets: list[nn.Module]) -> None:
    assert_same_bits(nets[0].parameters(), nets[1].parameters())


@over_others
def test_release_in_backward(declaration: Declaration) -> None:
    nets = twins()
    one, two = (declaration.ours(net.parameters(), **declaration.kwargs) for net in nets)
    release = faststep.release_gradients(nets[0], one)
    for step in range(5):
        assert all(p.grad is None for p in nets[0].parameters())
        for net, optimizer in zip(nets, (one, two), strict=True):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
    compare(nets)
    release.remove()


@over_others
def test_windows(declaration: Declaration) -> None:
    nets = twins()
    one, two = (declaration.ours(net.parameters(), **declaration.kwargs) for net in nets)
    window = faststep.accumulate(one, 2)
    for step in range(6):
        with window:
            window.backward(loss_of(nets[0], step))
        (loss_of(nets[1], step) / 2).backward()
        assert window.ready == (step % 2 == 1)
        if window.ready:
            for optimizer in (one, two):
                optimizer.step()
                optimizer.zero_grad()
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)
