"""FullyShardedDataParallel (FSDP1): a step that clips or scales knows of all ranks' parts."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import faststep
import faststep.optim
from ranks import assert_alike, on_ranks

from .common import backward, net
from .test_clipping import counted

LIMIT = 0.3
SCALE = 64.0
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def wrapped(original: bool, strategy: str, world: int) -> Any:
    """Each linear layer apart, and the rest, of which a part of the ranks has nothing."""
    mesh = None
    if strategy == "HYBRID_SHARD":
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
    return FullyShardedDataParallel(
        net(),
        use_orig_params=original,
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        sharding_strategy=getattr(ShardingStrategy, strategy),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )


@on_ranks(2, 4)
def test_trains(rank: int, world: int) -> None:
    """With clipping in the step, in place of the model's clip_grad_norm_."""
    strategies = ("HYBRID_SHARD",) if world == 4 else STRATEGIES
    for strategy in strategies:
        for original in (True, False):
            model, other = (wrapped(original, strategy, world) for _ in range(2))
            params, theirs = list(model.parameters()), list(other.parameters())
            optimizer = faststep.optim.AdamW(params, lr=0.1, max_grad_norm=LIMIT)
            reference = torch.optim.AdamW(theirs, lr=0.1)
            for step in range(3):
                backward(model, rank, step, 4.0)
                backward(other, rank, step, 4.0)
                norm = other.clip_grad_norm_(LIMIT)
                assert norm > LIMIT
                with counted() as groups:
                    optimizer.step()
                assert len(groups) == (strategy != "NO_SHARD")
                reference.step()
                assert optimizer.last_grad_norm is not None
                torch.testing.assert_close(optimizer.last_grad_norm, norm.float())
                assert_alike([optimizer.last_grad_norm])
                for one in (optimizer, reference):
                    one.zero_grad()
                for mine, its in zip(params, theirs, strict=True):
                    torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_scaled(rank: int, world: int) -> None:
    """An overflow on one rank makes all of them skip; max_norm= of the scaler clips by the norm."""
    for max_norm in (None, LIMIT):
        model = wrapped(True, "FULL_SHARD", world)
        params = list(model.parameters())
        optimizer = faststep.optim.SGD(params, lr=0.1)
        scaler = faststep.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
        scaler.scale(torch.zeros(()))
        for bad in (False, True, False):
            backward(model, rank, 0, scaler.get_scale())
            mine = [param for param in params if param.grad is not None and param.numel()]
            if bad and rank == 1:
                grad = mine[0].grad
                assert grad is not None
                grad[0] = math.inf
            before = copy.deepcopy([param.detach() for param in params])
            scale = scaler.get_scale()
            scaler.step(optimizer, max_norm=max_norm)
            scaler.update()
            same = all(map(torch.equal, before, params))
            assert same == bad, (rank, bad)
            assert scaler.get_scale() == (scale / 2 if bad else scale)
            optimizer.zero_grad()
        if max_norm is not None:
            assert optimizer.last_grad_norm is not None
            assert_alike([optimizer.last_grad_norm])


@on_ranks(2)
def test_without_its_model(rank: int, world: int) -> None:
    """The process group is known to the model only."""
    param = nn.Parameter(torch.ones(3))
    param._fsdp_flattened = True  # type: ignore[attr-defined]
    param.grad = torch.ones(3)
    optimizer = faststep.optim.SGD([("lost", param)], lr=0.1, max_grad_norm=1.0)
    with pytest.raises(RuntimeError, match=r"'lost'.*model that is gone; nothing was updated"):
        optimizer.step()
    assert torch.equal(param, torch.ones(3))


@on_ranks(2)
def test_stochastic_rounding_is_refused(rank: int, world: int) -> None:
    model = wrapped(True, "FULL_SHARD", world)
    noisy: dict[str, Any] = {"state_dtype": "bf16", "rounding": "stochastic"}
    optimizer = faststep.optim.AdamW(model.parameters(), **noisy)
    backward(model, rank, 0)
    with pytest.raises(RuntimeError, match=r"is for whole parameters, .* nothing was updated"):
        optimizer.step()
