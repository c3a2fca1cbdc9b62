"""Checkpoints of several ranks at each stage as one safetensors file, beside the model's weights.

What `consolidate` refuses and takes is in tests/cli/test_consolidate.py.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from faststep import optim, zero
from faststep.cli import main
from ranks import on_ranks

from .checkpoints import remove, shared_folder


class Tied(nn.Module):
    """Blocks of sizes that three ranks cannot share equally, tied weights and bf16."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.token = nn.Embedding(40, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.low = nn.Linear(7, 2, dtype=low)
        self.register_buffer("seen", torch.arange(5))
        self.head = nn.Linear(7, 40, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        low = self.low(x.to(self.low.weight.dtype)).float()
        return self.head(x).square().mean() + low.square().mean()


@on_ranks(3, kind=("1", "2", "3", "DDP"))
def test_every_stage(rank: int, world: int, kind: str) -> None:
    """Train, save in every way that the docs have, and compare what comes of it."""
    warnings.simplefilter("ignore")
    # fully_shard wants one dtype
    model: Any = Tied(torch.float32 if kind == "3" else torch.bfloat16)
    used = model
    if kind == "DDP":
        used = DistributedDataParallel(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        stage: Any = int(kind)
        optimizer = zero.shard(
            model, optim.AdamW(model.parameters(), lr=0.01), stage=stage, bucket_mb=0.001
        )
    for step in range(2):
        used(torch.arange(10) * (rank + step + 1) % 40).backward()
        optimizer.step()
        optimizer.zero_grad()
    path = shared_folder()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    states = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(states, checkpoint_id=path / "saved")
    dcp.async_save(states, checkpoint_id=path / "async").result()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    whole = {name: value.clone() for name, value in whole.items()}
    if kind != "3":
        gathered = optimizer.state_dict()
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": gathered}, path / "file")
    dist.barrier()
    wrong = []
    for name in ("saved", "async", "file") if rank == 0 else ():
        out = path / f"{name}.safetensors"
        if not (path / name).exists():
            continue
        if main(["consolidate", str(path / name), str(out)]):
            wrong.append(f"{name}: refused")
            continue
        found = load_file(out)
        if found.keys() != whole.keys():
            wrong.append(f"{name}: {found.keys() ^ whole.keys()}")
        wrong += [
            f"{name}: {key}"
            for key, value in whole.items()
            if found[key].dtype != value.dtype or not torch.equal(found[key], value)
        ]
    remove(path)
    found = wrong if rank or len(whole) == 13 else [f"{len(whole)} tensors"]
    assert not found, found
