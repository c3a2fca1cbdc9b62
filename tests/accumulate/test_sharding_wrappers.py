"""Parameters that a rank has only in part: a norm of what is here would be wrong, silently."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import faststep
from ranks import assert_alike, on_ranks

CLASSES = ("AdamW", "Adam", "SGD", "Lion")
STEPS = 3
LIMIT = 0.3
SCALE = 256.0


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 2))


def _input(rank: int, step: int) -> Tensor:
    source = torch.Generator().manual_seed(100 * rank + step)
    return 5 * torch.randn(3, 6, generator=source)


@on_ranks(2)
def test_zero_redundancy_refuses_a_norm_of_its_shard(rank: int, world: int) -> None:
    """What ZeRO says when it is given options that need all parameters."""
    instead = re.escape("faststep.clip_grad_norm_(model.parameters(), max_norm)")
    for name in CLASSES:
        cls = getattr(faststep.optim, name)
        for option in ({"max_grad_norm": 1.0}, {"max_grad_norm": 0.0}):
            params = list(_net().parameters())
            with pytest.raises(ValueError, match=f"max_grad_norm.*{instead}"):
                ZeroRedundancyOptimizer(params, cls, lr=0.1, **option)
    model = DistributedDataParallel(_net())
    zero = ZeroRedundancyOptimizer(model.parameters(), faststep.optim.AdamW, lr=0.1)
    with pytest.raises(TypeError, match="ZeroRedundancyOptimizer"):
        faststep.release_gradients(model, zero)
    overlap = {"optimizer_class": faststep.optim.AdamW, "overlap_with_ddp": True}
    with pytest.raises(ValueError):  # noqa: PT011 - torch's: it knows no functional twin
        ZeroRedundancyOptimizer(model.parameters(), **overlap)
    harmless = {"max_grad_norm": None, "keep_grads": False, "master_weights": False}
    ZeroRedundancyOptimizer(model.parameters(), faststep.optim.AdamW, **harmless)
    model(_input(rank, 0)).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    zero.optim.max_grad_norm = 1.0
    with pytest.raises(RuntimeError, match=instead):
        zero.step()
    zero.optim.max_grad_norm = None
    scaler = faststep.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(RuntimeError, match=instead):
        scaler.step(zero.optim, max_norm=1.0)
    assert all(map(torch.equal, before, model.parameters()))


@on_ranks(2, how=("plain", "clip", "scaler", "accumulate"))
def test_zero_redundancy_trains_as_torch(rank: int, world: int, how: str) -> None:
    """Clipped by hand or by the scaler, and accumulated: the norm is that of all gradients."""
    results = []
    for ours in (True, False):
        model = DistributedDataParallel(_net())
        params = list(model.parameters())
        if ours:
            optimizer: Any = ZeroRedundancyOptimizer(params, faststep.optim.AdamW, lr=0.1)
        else:
            optimizer = torch.optim.AdamW(params, lr=0.1)
        clip = faststep.clip_grad_norm_ if ours else nn.utils.clip_grad_norm_
        scaler: Any = None
        if how == "scaler":
            cls = faststep.amp.GradScaler if ours else torch.amp.GradScaler
            scaler = cls("cpu", init_scale=SCALE)
        accum = faststep.accumulate(optimizer, 2, model=model) if how == "accumulate" else None
        for step in range(2 * STEPS):
            loss = model(_input(rank, step)).square().mean()
            if accum is not None:
                with accum:
                    accum.backward(loss)
                if not accum.ready:
                    continue
            else:
                (loss if scaler is None else scaler.scale(loss)).backward()
            if how == "scaler" and ours:
                scaler.step(optimizer, max_norm=LIMIT)
                scaler.update()
            elif how == "scaler":
                scaler.unscale_(optimizer)
                clip(params, LIMIT)
                scaler.step(optimizer)
                scaler.update()
            else:
                if how == "clip":
                    clip(params, LIMIT)
                optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in params])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert_alike(results[0])


@on_ranks(2, original=(True, False))
def test_fully_sharded(rank: int, world: int, original: bool) -> None:
    """Shards under FullyShardedDataParallel, with and without the parameters as they were: what
    refuses them. tests/sharding/test_fsdp1.py trains them."""

    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(_net(), use_orig_params=original, device_id=cpu)
    params = list(model.parameters())
    optimizer = faststep.optim.AdamW(params, lr=0.1)
    model(_input(rank, 0)).square().mean().backward()
    before = [p.detach().clone() for p in params]
    scaler = faststep.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.zeros(()))
    other = torch.optim.SGD(params, lr=0.1)
    text = r"parameter 0 in group 0.*model\.clip_grad_norm_\(max_norm\)"
    with pytest.raises(RuntimeError, match=text):
        scaler.step(other, max_norm=LIMIT)
    assert all(map(torch.equal, before, params))
    with pytest.raises(TypeError, match="parameter 0 in group 0"):
        faststep.release_gradients(model, optimizer)


def test_a_groups_own_limit_is_refused() -> None:
    """It was ignored: the norm is one of all groups."""
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = faststep.optim.SGD(params[:1], lr=0.1)
    groups = copy.copy(optimizer.param_groups)
    with pytest.raises(ValueError, match="max_grad_norm"):
        optimizer.add_param_group({"params": params[1:], "max_grad_norm": 1.0})
    assert optimizer.param_groups == groups
    with pytest.raises(ValueError, match="keep_grads"):
        faststep.optim.Lion([{"params": params, "keep_grads": True}])
