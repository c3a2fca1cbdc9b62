"""Clipping and AdamW's step on DTensors: dtensor_steps.py WHO TENSORS ELEMENTS ROUNDS, by ranks.py.

Prints the seconds of each round on rank 0, as JSON. The parameters are sharded over all ranks by
their first dimension, as fully_shard has them. WHO is a key of STEPS.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

from contenders import OURS
from ranks import answer_of

MAX_NORM = 1.0
WARM = 3


def _of_ours(params: list[Parameter]) -> Callable[[], object]:
    import faststep.optim

    return faststep.optim.AdamW(params, lr=1e-4, max_grad_norm=MAX_NORM).step


def _of_torch(params: list[Parameter]) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    return step


TORCH = "torch fused"
STEPS = {OURS: _of_ours, TORCH: _of_torch}


def measured(who: str, tensors: int, elements: int, rounds: int) -> list[float]:
    """Seconds of each round."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded(values: Tensor) -> DTensor:
        return distribute_tensor(values, mesh, [Shard(0)])

    params = [Parameter(sharded(torch.randn(elements))) for _ in range(tensors)]
    step = STEPS[who](params)
    seconds = []
    for number in range(WARM + rounds):
        for param in params:
            local = torch.randn_like(param.to_local())
            # With the parameter's own spec, as fully_shard makes gradients.
            param.grad = DTensor(local, param._spec, requires_grad=False)
        dist.barrier()
        start = time.perf_counter()
        step()
        if number >= WARM:
            seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    answer_of(lambda: measured(sys.argv[1], *map(int, sys.argv[2:])))
