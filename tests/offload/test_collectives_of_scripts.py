"""offload() on ranks whose script averages gradients or parameters by itself.

Collectives of torch.distributed move no version counters.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import faststep
from ranks import on_ranks

from .common import assert_same, bits


def _trained(rank: int, options: dict[str, Any] | None, way: str) -> list[Any]:
    model = nn.Linear(30, 20)
    with torch.no_grad():
        model.weight.fill_(rank + 0.1)
        model.bias.fill_(rank)
    optimizer = faststep.optim.AdamW(model.parameters(), lr=0.1)
    if options is not None:
        faststep.offload(optimizer, **options)
    called: nn.Module = model
    if way == "wrapped":
        called = DistributedDataParallel(model)
    else:
        for param in model.parameters():
            dist.broadcast(param.detach(), 0)
    for step in range(3):
        called(torch.full((2, 30), rank + step + 1.0)).square().mean().backward()
        if way == "gradients":
            _add_up(param.grad for param in model.parameters())
        optimizer.step()
        if way == "parameters":
            _add_up(param.detach() for param in model.parameters())
        optimizer.zero_grad()
    return bits(model.state_dict(), optimizer.state_dict())


def _add_up(tensors: Any) -> None:
    for tensor in tensors:
        assert isinstance(tensor, Tensor)
        dist.all_reduce(tensor)


@on_ranks(2, way=["gradients", "parameters", "wrapped"], in_backward=[False, True])
def test_what_ranks_write_is_seen(rank: int, world: int, way: str, in_backward: bool) -> None:
    plain = _trained(rank, None, way)
    assert_same(_trained(rank, {"in_backward": in_backward}, way), plain)
