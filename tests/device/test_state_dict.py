"""State dicts of CUDA parameters, to and from torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import faststep
from optim.common import same_bits

from . import fake
from .common import Pair, values

pytestmark = pytest.mark.usefixtures("machine")


def stepped(pair: Pair, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        for i, q in enumerate(pair.cuda):
            q.grad = fake.claim(values(tuple(q.shape), 10 * step + i, q.dtype))
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "on_device"),
    [
        ({}, False),
        ({"fused": True}, True),
        ({"capturable": True}, True),
        ({"foreach": True}, False),
    ],
)
def test_step_lies_where_torch_keeps_it(options: dict[str, Any], on_device: bool) -> None:
    pair = Pair([torch.ones(3), torch.ones(2)])
    optimizer = faststep.optim.AdamW(pair.cuda, **options)
    stepped(pair, optimizer)
    saved = optimizer.state_dict()
    for index, p in enumerate(pair.cuda):
        step = saved["state"][index]["step"]
        assert step.is_cuda is on_device
        assert step.dtype == torch.float32
        assert float(fake.plain(step)) == 2.0
        assert optimizer.state[p]["step"].is_cuda, "the optimizer keeps its own"


def test_continues_from_its_own_state_dict() -> None:
    pair = Pair([values((5,), 0, torch.float32), values((70,), 1, torch.bfloat16)])
    optimizer = faststep.optim.AdamW(pair.cuda, lr=0.1)
    stepped(pair, optimizer)
    others = [torch.nn.Parameter(fake.claim(fake.plain(q).clone())) for q in pair.cuda]
    other = faststep.optim.AdamW(others, lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for q, twin in zip(pair.cuda, others, strict=True):
        grad = values(tuple(q.shape), 77, q.dtype)
        q.grad, twin.grad = fake.claim(grad.clone()), fake.claim(grad.clone())
    optimizer.step()
    other.step()
    for q, twin in zip(pair.cuda, others, strict=True):
        assert same_bits(fake.plain(q), fake.plain(twin))
        assert other.state[twin]["step"].is_cuda
        assert float(fake.plain(other.state[twin]["step"])) == 3.0


def test_continues_from_torchs_state_dict() -> None:
    pair = Pair([values((5,), 0, torch.float32)])
    theirs = torch.optim.AdamW(pair.cuda, lr=0.1, foreach=False)
    stepped(pair, theirs)
    assert not theirs.state[pair.cuda[0]]["step"].is_cuda
    ours = faststep.optim.AdamW(pair.cuda, lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    stepped(pair, ours, 1)
    state = ours.state[pair.cuda[0]]
    assert state["step"].is_cuda
    assert float(fake.plain(state["step"])) == 3.0


def test_a_counter_that_the_user_moved_to_the_cpu() -> None:
    pair = Pair([torch.ones(3)])
    optimizer = faststep.optim.AdamW(pair.cuda)
    stepped(pair, optimizer)
    optimizer.state[pair.cuda[0]]["step"] = torch.tensor(10.0)
    stepped(pair, optimizer, 1)
    assert float(fake.plain(optimizer.state[pair.cuda[0]]["step"])) == 11.0
