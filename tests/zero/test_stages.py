"""What comes after `shard`, or differs between ranks, at stages 1, 2 and 3."""

from typing import Any

import pytest
import torch
from torch import nn

from faststep import zero
from ranks import on_ranks

from .common import check_error


@on_ranks(2)
def test_what_is_refused_at_each_stage(rank: int, world: int) -> None:
    """What comes after shard(), or differs between ranks, at each stage."""

    def refuse(model: nn.Module, stage: Any, text: str) -> None:
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        check_error(lambda: zero.shard(model, made, stage=stage), text)

    for stage in (1, 2, 3):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        made = torch.optim.SGD(model[0].parameters(), lr=0.1)
        optimizer = zero.shard(model, made, stage=stage)  # type: ignore[arg-type]
        group = {"params": list(model[1].parameters())}
        optimizer.add_param_group(group)
        last = torch.optim.SGD(model[2].parameters(), lr=0.1)
        second = zero.shard(model, last, stage=stage)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="sharded already, for another optimizer"):
            second.add_param_group(group)
        if stage < 3:
            optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
            optimizer.param_groups[0]["params"][-1].grad = torch.ones(2)
            check_error(optimizer.step, "not in the model, the first of shape (2,)")
        names = ["x", "y"] if rank == 0 else ["y", "x"]
        other = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})
        differ = "RuntimeError: shard(): the ranks differ, first in number 2: rank 0 has {} (3, 3)"
        refuse(other, stage, differ.format("'x.weight'"))
        refuse(nn.Linear(3, 3 + rank), stage, differ.format("'weight'"))
    refuse(nn.Linear(3, 0), 3, "TypeError: shard(stage=3): parameter 'weight' has no el")
