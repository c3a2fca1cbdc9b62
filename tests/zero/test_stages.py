"""The same odd models and loops at stages 1, 2 and 3, against one process with all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import faststep
from faststep import zero
from faststep._torch.dtensor import full_tensor
from ranks import on_ranks

from .beside_ddp import RANKS
from .common import check_error

STEPS = 3


class _Block(nn.Module):
    """Two layers of one size, of which a rank may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)

    def forward(self, x: Tensor, use: str) -> Tensor:
        for name in use:
            x = x + getattr(self, name)(x).tanh()
        return x


class _Net(nn.Module):
    """A tied embedding, a frozen parameter without elements, and blocks."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.empty = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
        self.how = how

    def forward(self, tokens: Tensor, use: str = "ab") -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            used = use if number == 1 else "ab"
            if self.how in ("reentrant", "not reentrant"):
                x = checkpoint(block, x, used, use_reentrant=self.how == "reentrant")
            else:
                x = block(x, used)
        return self.head(x)  # type: ignore[no-any-return]


def _loss(model: Any, rank: int, step: int, use: str = "ab") -> Tensor:
    made = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(11, (4, 5), generator=made)
    return nn.functional.cross_entropy(model(tokens, use).flatten(0, 1), tokens.flatten())


def _optimizer(model: nn.Module) -> Any:
    return faststep.optim.AdamW(model.named_parameters(), lr=0.05, max_grad_norm=0.5)


def _uses(how: str, rank: int, step: int) -> str:
    """What a rank uses of the second block."""
    return "ab"[(rank + step) % 2] if how == "skipped" else "ab"


def _whole(world: int, how: str) -> list[Tensor]:
    """What one process trains with the gradients of all ranks."""
    model = _Net(how)
    optimizer = _optimizer(model)
    model.blocks[0].a.weight.requires_grad_(how != "unfrozen")
    for step in range(STEPS):
        model.blocks[0].a.weight.requires_grad_(how != "unfrozen" or step > 0)
        for rank in range(world):
            for micro in range(2 if how == "no_sync" else 1):
                number = step + 50 * micro
                (_loss(model, rank, number, _uses(how, rank, step)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def _sharded(rank: int, stage: Any, how: str) -> list[Tensor]:
    model: Any = _Net(how)
    called = model
    if stage == "wrapped":
        called = DistributedDataParallel(model, find_unused_parameters=how == "skipped")
    model.blocks[0].a.weight.requires_grad_(how != "unfrozen")
    size: dict[str, Any] = {"stage": 2} if stage == "wrapped" else {"stage": stage}
    optimizer = zero.shard(called, _optimizer(model), bucket_mb=1e-3, **size)
    if how == "compiled":
        torch.compiler.reset()
        called = torch.compile(called, backend="eager")
    for step in range(STEPS):
        model.blocks[0].a.weight.requires_grad_(how != "unfrozen" or step > 0)
        if how == "no_sync":
            with (called if stage == "wrapped" else optimizer).no_sync():
                _loss(called, rank, step + 50).backward()
        _loss(called, rank, step, _uses(how, rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.head.weight is model.embedding.weight
    return [full_tensor(param.detach()) for param in model.parameters()]


STAGES = (1, 2, "wrapped", 3)
HOWS = ("plain", "reentrant", "not reentrant", "no_sync", "skipped", "unfrozen", "compiled")


@on_ranks(*RANKS, stage=STAGES)
def test_odd_loops(rank: int, world: int, stage: Any) -> None:
    said: dict[str, Any] = {}
    for how in HOWS:
        if how == "skipped" and stage == 3 and world > 2:
            continue  # gloo waits for gradients of other sizes
        try:
            values = _sharded(rank, stage, how)
        except RuntimeError as error:
            said[how] = str(error)
            continue
        expected = _whole(world, how)
        pairs = zip(values, expected, strict=True)
        said[how] = max(float((a - b).abs().max()) for a, b in pairs if a.numel())
    if stage == 3 and world == 2:  # a gradient of one size of each rank, of different parameters
        text = said.pop("skipped")
        assert "nothing was updated, as fully_shard adds up gradients wrongly" in text, text
        assert "rank 0 has 'blocks.1.a.weight' with a gradient, in group 0; rank 1" in text, text
    assert set(said) == set(HOWS) - ({"skipped"} if stage == 3 else set())
    assert max(said.values()) < 1e-5, said


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
