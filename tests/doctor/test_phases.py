"""The phase that a stack says, from within it."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

import faststep
from faststep.doctor.phases import look


def here() -> str:
    return look(threading.get_ident())[0]


@pytest.mark.parametrize("kind", [torch.optim.SGD, faststep.optim.SGD])
def test_a_closure_is_no_part_of_the_optimizer(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.1)
    said = []

    def closure() -> torch.Tensor:
        said.append(here())
        weight.register_hook(lambda grad: said.append(here()))
        loss = weight.sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert said == ["everything else", "backward"]


def test_a_step_of_the_scripts_own_class_is_one() -> None:
    said = []

    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            said.append(here())

    Own([torch.ones(1, requires_grad=True)], {}).step()
    assert said == ["optimizer"]


def test_a_hook_of_ddp_is_communication() -> None:
    weight = torch.ones(2, requires_grad=True)
    said = []

    def sent(state: object, bucket: object) -> None:
        said.append(here())

    weight.register_hook(lambda grad: sent(None, grad))
    weight.sum().backward()
    sent(None, None)
    assert said == ["communication", "everything else"]


def test_forward_without_gradients_looks_at_a_model() -> None:
    said = []

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            said.append(here())
            return x

    layer = Layer()
    layer(torch.ones(1))
    with torch.no_grad():
        layer(torch.ones(1))  # with what a teacher says, training goes on

    with torch.no_grad():
        accuracy = layer(torch.ones(1))
    assert accuracy

    def validate() -> None:
        layer(torch.ones(1))

    validate()
    assert said == ["forward", "forward", "evaluation", "evaluation"]
