"""What was trained before goes on at stage 3, with states or parameters in host memory."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import faststep
from faststep import zero
from ranks import on_ranks


@on_ranks(2)
def test_stage_3_offloads(rank: int, world: int) -> None:
    """States, or also parameters and gradients, lie in host memory, with the same bits."""
    models, optimizers = [], []
    for offload in ("params", "optimizer", None):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
        optimizer = faststep.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()  # states that are there already move too
        optimizer.zero_grad()
        blocks = [model[0]]
        options: Any = {"stage": 3, "blocks": blocks, "max_grad_norm": 0.5, "offload": offload}
        optimizers.append(zero.shard(model, optimizer, **options))
        models.append(model)
        for module in (model, *blocks):
            policy = module._get_fsdp_state()._fsdp_param_group.offload_policy
            assert isinstance(policy, CPUOffloadPolicy) == (offload == "params")
    for number in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(world * number + rank))
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for params in zip(*(model.parameters() for model in models), strict=True):
            *others, last = (param.to_local() for param in params)
            assert all(torch.equal(other, last) for other in others)
    *others, last = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for other in others:
        torch.testing.assert_close(other, last, rtol=0, atol=0)
