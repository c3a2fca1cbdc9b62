"""`shard(stage=3)`: torch's fully_shard under an optimizer that exists already."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import faststep.optim
from faststep.cli.scripts.gpt import GPT, GPTConfig
from faststep.zero import shard
from ranks import on_ranks

from .common import whole

SMALL = GPTConfig(layers=2, heads=2, width=16, context=8)


def rows_of(step: int, rank: int, world: int) -> Tensor:
    source = torch.Generator().manual_seed(step)
    return torch.randint(256, (2 * world, 9), generator=source)[rank::world]


def backward(model: nn.Module, rows: Tensor) -> float:
    loss = model(rows[:, :-1], rows[:, 1:])
    loss.backward()
    return float(loss.detach())


def mean_over_ranks(model: nn.Module, world: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= world


def check_losses(
    model: Any, optimizer: Any, reference: Any, plain: Any, rank: int, world: int, first: int
) -> None:
    for step in range(first, first + 3):
        rows = rows_of(step, rank, world)
        loss, expected = backward(model, rows), backward(reference, rows)
        mean_over_ranks(reference, world)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        plain.step()
        assert loss == pytest.approx(expected, rel=1e-4)
        optimizer.zero_grad()
        plain.zero_grad()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs.detach(), rtol=1e-3, atol=1e-5)


def check_stage(rank: int, world: int, make: Callable[..., Any]) -> None:
    """From a model that differs on each rank, before the first step and after two."""
    for before in (0, 2):
        torch.manual_seed(rank)
        model = GPT(SMALL)
        torch.manual_seed(0)
        if before:  # ranks agree already
            model = GPT(SMALL)
        else:
            reference = GPT(SMALL)
        groups = [
            {"params": list(model.blocks.parameters()), "lr": 0.02},
            {"params": [p for n, p in model.named_parameters() if not n.startswith("blocks")]},
        ]
        optimizer = make(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(before):
            backward(model, rows_of(step, rank, world))
            mean_over_ranks(model, world)
            optimizer.step()
            optimizer.zero_grad()
        if before or rank == 0:
            reference = copy.deepcopy(model)
        for param in reference.parameters():
            dist.broadcast(param.detach(), 0)
        names = {id(p): n for n, p in model.named_parameters()}
        by_name = dict(reference.named_parameters())
        plain_groups = [
            {"params": [by_name[names[id(p)]] for p in group["params"]], "lr": group["lr"]}
            for group in optimizer.param_groups
        ]
        plain = make(plain_groups, lr=0.01)
        if before:
            plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        entries = optimizer.param_groups
        sharded = shard(model, optimizer, stage=3, max_grad_norm=0.5)
        assert sharded.param_groups is entries
        assert all(isinstance(param, DTensor) for param in model.parameters())
        check_losses(model, sharded, reference, plain, rank, world, before)
        schedule.step()
        assert sharded.param_groups[0]["lr"] == 0.01


@on_ranks(2, 4)
def test_adamw(rank: int, world: int) -> None:
    check_stage(rank, world, faststep.optim.AdamW)


@on_ranks(2)
def test_sgd(rank: int, world: int) -> None:
    check_stage(rank, world, lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


@on_ranks(2)
def test_tied_and_frozen(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = Tied()
    model.blocks[0].bias.requires_grad_(False)
    optimizer = faststep.optim.AdamW(model.parameters(), lr=0.1)
    sharded = shard(model, optimizer, stage=3)
    assert model.head.weight is model.token.weight
    frozen = whole(model.blocks[0].bias)
    before = whole(model.token.weight)
    model(torch.tensor([[0, 1, 2]])).square().mean().backward()
    sharded.step()
    assert torch.equal(whole(model.blocks[0].bias), frozen)
    assert not torch.equal(whole(model.token.weight), before)


@on_ranks(2)
def test_refused(rank: int, world: int) -> None:
    model = Tied()
    stranger = nn.Parameter(torch.ones(2))
    optimizer = faststep.optim.SGD([*model.parameters(), stranger], lr=0.1)
    with pytest.raises(ValueError, match="1 parameters of the optimizer are not in the model"):
        shard(model, optimizer, stage=3)
    optimizer = faststep.optim.SGD(list(model.named_parameters()), lr=0.1)
    model(torch.tensor([[0]])).sum().backward()
    with pytest.raises(RuntimeError, match=r"'token.weight' has a gradient: call zero_grad\(\)"):
        shard(model, optimizer, stage=3)
    model.zero_grad()
    model.token.weight.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match=r"'token\.weight' has hooks"):
        shard(model, optimizer, stage=3)
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1  # it was not replaced


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


@on_ranks(2)
def test_what_would_silently_differ(rank: int, world: int) -> None:
    """Blocks in other orders, or others left out, and what fully_shard ignores."""
    model = Blocks()
    sharded = shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=3)

    def step(order: list[int]) -> None:
        model.order = order
        sharded.zero_grad(set_to_none=False)
        model(torch.ones(2, 4)).sum().backward()
        sharded.step()

    step([0, 1, 2])
    before = whole(model.blocks[0][0].weight)
    for order in ([0, 1, 2], [0, 2]) if rank else ([1, 0, 2], [1, 2]):
        with pytest.raises(RuntimeError, match=r"nothing was updated.*called its blocks in the"):
            step(order)
    assert torch.equal(before, whole(model.blocks[0][0].weight))
    step([0, 1, 2])
    param = model.blocks[1][0].weight
    calls: list[Tensor] = []
    param.register_post_accumulate_grad_hook(calls.append)
    step([0, 1, 2])
    assert len(calls) == 1
    handle = param.register_hook(calls.append)
    step([0, 1, 2])
    assert calls[1].shape == (4, 4)  # the gradient of this rank
    handle.remove()
    step([0, 1, 2])
    assert len(calls) == 4
    param.data = param.data * 2
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.0\.weight' was given values by \.data ="):
        step([0, 1, 2])
