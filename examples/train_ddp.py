"""The GPT of train_gpt.py on several ranks; gradients and optimizer states are sharded.

    pip install .
    torchrun --nproc-per-node 2 examples/train_ddp.py --checkpoint sorting.pt

The change from a script with DistributedDataParallel:

    +from faststep.zero import shard
     ...
    -model = DistributedDataParallel(model)
     optimizer = AdamW(model.parameters(), lr=1e-3)
    +optimizer = shard(model, optimizer, stage=2, max_grad_norm=1.0)
     ...
    -torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
     optimizer.step()

A run that was killed goes on from its last checkpoint when it is started again, also with another
number of ranks. The rows of a step depend on its number alone, and each rank takes its part of
them. So the losses are those of a run that was not disturbed, up to rounding.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from train_gpt import DIGITS, SortingGPT, accuracy, batch_of

from faststep.optim import AdamW
from faststep.zero import shard

BATCH = 64  # rows of all ranks together


def rows_of(step: int) -> Tensor:
    """This rank's part of the rows of a step."""
    torch.manual_seed(step)
    return batch_of(BATCH)[dist.get_rank() :: dist.get_world_size()]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """The mean cross entropy of the sorted digits."""
    logits = model(rows[:, :-1])[:, DIGITS:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, DIGITS + 1 :].flatten())


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; a kill at any time leaves the old one or the new one, whole."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def main() -> float:
    """Train, and return the share of rows that the model sorts without a mistake."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="a file; it is read if it exists")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = SortingGPT()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    optimizer = shard(model, optimizer, stage=2, max_grad_norm=1.0)
    done = 0
    if args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    for step in range(done + 1, args.steps + 1):
        loss = loss_of(model, rows_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.every:
            continue
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        states = optimizer.state_dict()  # all ranks take part; rank 0 gets the states
        if dist.get_rank() == 0:
            print(f"step {step:4}  loss {mean.item():.6f}", flush=True)
            if args.checkpoint:
                state = {"model": model.state_dict(), "optimizer": states, "step": step}
                save(args.checkpoint, state)
    torch.manual_seed(0)
    right = accuracy(model)
    if dist.get_rank() == 0:
        print(f"sorted without a mistake: {100 * right:.1f} % of 500 unseen rows")
    dist.destroy_process_group()
    return right


if __name__ == "__main__":
    main()
