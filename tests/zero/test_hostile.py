"""What a script does between `shard` and a step that could change an update without a message."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from faststep import zero
from ranks import on_ranks

from .common import error_of


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    made = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(4, 3, 8, 8, generator=made)).square().mean()  # type: ignore[no-any-return]


def _whole(world: int, steps: int) -> nn.Module:
    """What one process trains with the gradients of all ranks."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (_loss(model, rank, step) / world).backward()
        optimizer.step()
    return model


def _distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)


def _step(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    _loss(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2, stage=(1, 2))
def test_a_memory_format_that_is_set_later(rank: int, world: int, stage: Any) -> None:
    """A model whose parameters get another memory format after some steps."""
    model = _net()
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=stage)
    _step(model, optimizer, rank, 0)
    before = optimizer.state_dict()["state"]
    model.to(memory_format=torch.channels_last)
    after = optimizer.state_dict()["state"]
    states = [torch.equal(before[key]["exp_avg"], after[key]["exp_avg"]) for key in before]
    model.to(memory_format=torch.contiguous_format)
    _step(model, optimizer, rank, 1)
    model.to(memory_format=torch.channels_last)
    _step(model, optimizer, rank, 2)
    assert all(states)
    assert _distance(model, _whole(world, 3)) < 1e-6


@on_ranks(2)
def test_ranks_with_other_strides_are_told_so(rank: int, world: int) -> None:
    model = _net()
    if rank == 0:
        model.to(memory_format=torch.channels_last)
    said = error_of(lambda: zero.shard(model, torch.optim.AdamW(model.parameters())))
    assert said.startswith("RuntimeError: shard(): the ranks differ"), said
    assert "'0.weight'" in said


@on_ranks(2)
def test_autograd_grad_between_backward_and_step(rank: int, world: int) -> None:
    """torch.autograd.grad after backward calls hooks of parameters, and adds to no `.grad`."""
    for wrapped in (False, True):
        inside = _net()
        model: Any = DistributedDataParallel(inside) if wrapped else inside
        optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in range(2):
            _loss(model, rank, step).backward()
            torch.autograd.grad(_loss(inside, rank, 9), list(inside.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        assert _distance(inside, _whole(world, 2)) < 1e-6


class _TiedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight


@on_ranks(2)
def test_stage_3_does_not_part_tied_parameters(rank: int, world: int) -> None:
    model = _TiedBlocks()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"'blocks\.0\.weight' and 'blocks\.2\.weight'"):
        zero.shard(model, optimizer, stage=3, blocks=list(model.blocks))
    assert model.blocks[2].weight is model.blocks[0].weight


@on_ranks(2)
def test_loading_waits_for_what_arrives(rank: int, world: int) -> None:
    """Parameters that are loaded while others still arrive."""
    model = _net()
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), gather="forward")
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    part = {key: value.clone() for key, value in model[3].state_dict().items()}
    quiet = []
    for load in (lambda: model.load_state_dict(saved), lambda: model[3].load_state_dict(part)):
        _loss(model, rank, 0).backward()
        optimizer.step()
        quiet.append(bool(optimizer._engine._under_way))
        load()
        optimizer.wait()
        quiet.append(torch.equal(model[3].weight, saved["3.weight"]))
    assert quiet == [True] * 4, quiet


@on_ranks(2)
def test_ranks_with_other_arguments_are_told_so(rank: int, world: int) -> None:
    for options, name in (
        ({"stage": 1 + rank}, "stage 2"),
        ({"bucket_mb": 1 + rank}, "bucket_mb 2.0"),
        ({"max_grad_norm": 1.0 + rank}, "max_grad_norm 2.0"),
    ):
        model = _net()
        with pytest.raises(RuntimeError, match=rf"^shard\(\): the ranks differ.*{name}"):
            zero.shard(model, torch.optim.AdamW(model.parameters()), **options)  # type: ignore[arg-type]
