"""What a script does between `shard` and a step that could change an update without a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from accumulate.processes import Job
from faststep import zero

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
Ranks = Callable[[str], list[Any]]


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


def _other_strides(rank: int, world: int, stage: Any) -> dict[str, Any]:
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
    return {"states": all(states), "distance": _distance(model, _whole(world, 3))}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_memory_format_that_is_set_later(stage: int, ranks: Ranks) -> None:
    for said in ranks(f"other strides, stage {stage}"):
        assert said["states"]
        assert said["distance"] < 1e-6


def _strides_differ(rank: int, world: int) -> str:
    model = _net()
    if rank == 0:
        model.to(memory_format=torch.channels_last)
    try:
        zero.shard(model, torch.optim.AdamW(model.parameters()))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_with_other_strides_are_told_so(ranks: Ranks) -> None:
    for said in ranks("strides differ"):
        assert said.startswith("shard(): the ranks differ")
        assert "'0.weight'" in said


ZERO_JOBS = [
    *(Job(f"other strides, stage {stage}", 2, _other_strides, (stage,)) for stage in (1, 2)),
    Job("strides differ", 2, _strides_differ),
]
