"""The GPT of train_gpt.py with its parameters sharded by torch's fully_shard (FSDP2).

    pip install .
    torchrun --nproc-per-node 2 examples/train_fsdp.py

The change from a script with torch alone:

    -from torch.optim import AdamW
    +from faststep.optim import AdamW
     ...
    -optimizer = AdamW(model.parameters(), lr=1e-3)
    +optimizer = AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
     ...
    -torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
     optimizer.step()

Each rank holds a part of every parameter, as a DTensor. The step clips by the norm of the gradients
of all ranks, for which they exchange a few numbers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_gpt import DIGITS, SortingGPT, batch_of

from faststep.optim import AdamW

STEPS = 100
BATCH = 64  # rows of all ranks together


def main() -> None:
    """Train, and print the mean loss of the ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = SortingGPT()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    for step in range(1, STEPS + 1):
        rows = batch_of(BATCH)[dist.get_rank() :: dist.get_world_size()]
        logits = model(rows[:, :-1])[:, DIGITS:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, DIGITS + 1 :].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                norm = float(optimizer.last_grad_norm)
                print(f"step {step:4}  loss {mean.item():.4f}  norm before clipping {norm:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
