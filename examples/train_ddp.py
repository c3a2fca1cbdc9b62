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
number of ranks. The checkpoint has the loader's position in the epoch, counted over all ranks, and
the ranks together take BATCH rows per step. So each step gets the rows of a run that was not
disturbed, and the losses are the same up to rounding.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from train_gpt import DIGITS, SortingGPT, accuracy, batch_of

from faststep.data import DataLoader, KeyedSampler
from faststep.optim import AdamW
from faststep.zero import shard

BATCH = 64  # rows of all ranks together


def loader_of(rows: Tensor) -> DataLoader:
    """This rank's part of each batch; KeyedSampler shuffles, and shares rows among the ranks."""
    share, rest = divmod(BATCH, dist.get_world_size())
    if rest:
        raise SystemExit(f"{BATCH} rows per step cannot be shared by {dist.get_world_size()} ranks")
    data = TensorDataset(rows)
    return DataLoader(data, share, sampler=KeyedSampler(data, drop_last=True), drop_last=True)


def batches_of(loader: DataLoader) -> Iterator[Tensor]:
    """The batches of all epochs."""
    while True:
        for (rows,) in loader:
            yield rows


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
    parser.add_argument("--rows", type=int, default=12800, help="rows of an epoch")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = SortingGPT()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    optimizer = shard(model, optimizer, stage=2, max_grad_norm=1.0)
    loader = loader_of(batch_of(max(args.rows, BATCH)))  # the seed makes the same rows on all ranks
    done = 0
    if args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        done = state["step"]
    for step, rows in zip(range(done + 1, args.steps + 1), batches_of(loader), strict=False):
        loss = loss_of(model, rows)
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
                save(args.checkpoint, {**state, "loader": loader.state_dict()})
    torch.manual_seed(1)
    right = accuracy(model)
    if dist.get_rank() == 0:
        print(f"sorted without a mistake: {100 * right:.1f} % of 500 unseen rows")
    dist.destroy_process_group()
    return right


if __name__ == "__main__":
    main()
