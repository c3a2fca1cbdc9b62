"""Parameters that a rank has only in part: a norm of what is here would be wrong, silently."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import faststep
from ranks import Job

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


def _outcome(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def zero_refuses(rank: int, world: int) -> dict[str, Any]:
    """What ZeRO says when it is given options that need all parameters."""
    found: dict[str, Any] = {}
    for name in CLASSES:
        cls = getattr(faststep.optim, name)
        for option in ({"max_grad_norm": 1.0}, {"max_grad_norm": 0.0}):
            params = list(_net().parameters())
            call = lambda p=params, c=cls, o=option: ZeroRedundancyOptimizer(p, c, lr=0.1, **o)  # noqa: E731
            found[f"{name} {option}"] = _outcome(call)
    model = DistributedDataParallel(_net())
    zero = ZeroRedundancyOptimizer(model.parameters(), faststep.optim.AdamW, lr=0.1)
    found["release"] = _outcome(lambda: faststep.release_gradients(model, zero))
    overlap = {"optimizer_class": faststep.optim.AdamW, "overlap_with_ddp": True}
    found["overlap"] = _outcome(lambda: ZeroRedundancyOptimizer(model.parameters(), **overlap))
    harmless = {"max_grad_norm": None, "keep_grads": False, "master_weights": False}
    call = lambda: ZeroRedundancyOptimizer(model.parameters(), faststep.optim.AdamW, **harmless)  # noqa: E731
    found["harmless"] = _outcome(call)
    model(_input(rank, 0)).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    zero.optim.max_grad_norm = 1.0
    found["reached inside"] = _outcome(zero.step)
    zero.optim.max_grad_norm = None
    scaler = faststep.amp.GradScaler("cpu", enabled=False)
    found["by the scaler"] = _outcome(lambda: scaler.step(zero.optim, max_norm=1.0))
    found["untouched"] = all(map(torch.equal, before, model.parameters()))
    return found


def zero_trains(rank: int, world: int, how: str) -> list[list[Tensor]]:
    """Parameters after some steps of our class under ZeRO, and of torch's without."""
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
    return results


def fsdp(rank: int, world: int, original: bool) -> dict[str, Any]:
    """Shards under FullyShardedDataParallel, with and without the parameters as they were."""

    def made() -> tuple[Any, list[Tensor]]:
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(_net(), use_orig_params=original, device_id=cpu)
        return model, list(model.parameters())

    def backward(model: Any, step: int, scale: float = 1.0) -> None:
        (model(_input(rank, step)).square().mean() * scale).backward()

    found: dict[str, Any] = {}
    model, params = made()
    optimizer = faststep.optim.AdamW(params, lr=0.1)
    backward(model, 0)
    before = [p.detach().clone() for p in params]
    scaler = faststep.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.zeros(()))
    other = torch.optim.SGD(params, lr=0.1)
    found["scaler"] = _outcome(lambda: scaler.step(other, max_norm=LIMIT))
    found["untouched by the scaler"] = all(map(torch.equal, before, params))
    found["release"] = _outcome(lambda: faststep.release_gradients(model, optimizer))
    results = []
    for ours in (True, False):
        model, params = made()
        cls = faststep.optim.AdamW if ours else torch.optim.AdamW
        optimizer = cls(params, lr=0.1)
        for step in range(STEPS):
            backward(model, step)
            model.clip_grad_norm_(LIMIT)
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in params])
    found["trained"] = results
    return found


WAYS = ("plain", "clip", "scaler", "accumulate")
JOBS = (
    Job("zero refuses", 2, zero_refuses),
    *(Job(f"zero trains {how}", 2, zero_trains, (how,)) for how in WAYS),
    Job("fsdp, original", 2, fsdp, (True,)),
    Job("fsdp, flat", 2, fsdp, (False,)),
)


def test_zero_redundancy_refuses_a_norm_of_its_shard(ranks: Callable[[str], list[Any]]) -> None:
    for found in ranks("zero refuses"):
        for name in CLASSES:
            for option in ({"max_grad_norm": 1.0}, {"max_grad_norm": 0.0}):
                error, text = found[f"{name} {option}"]
                assert error == "ValueError"
                assert "max_grad_norm" in text
                assert "faststep.clip_grad_norm_(model.parameters(), max_norm)" in text
        assert found["release"][0] == "TypeError"
        assert "ZeroRedundancyOptimizer" in found["release"][1]
        assert found["overlap"][0] == "ValueError"  # torch's: it knows no functional twin
        assert found["harmless"] == ("", "")
        for call in ("reached inside", "by the scaler"):
            error, text = found[call]
            assert error == "RuntimeError", call
            assert "faststep.clip_grad_norm_(model.parameters(), max_norm)" in text
        assert found["untouched"]


@pytest.mark.parametrize("how", WAYS)
def test_zero_redundancy_trains_as_torch(how: str, ranks: Callable[[str], list[Any]]) -> None:
    """Clipped by hand or by the scaler, and accumulated: the norm is that of all gradients."""
    first, second = ranks(f"zero trains {how}")
    for mine, other in zip(*first, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    for mine, other in zip(first[0], second[0], strict=True):
        assert torch.equal(mine, other), "ranks have drifted apart"


@pytest.mark.parametrize("kind", ["original", "flat"])
def test_fully_sharded(kind: str, ranks: Callable[[str], list[Any]]) -> None:
    for found in ranks(f"fsdp, {kind}"):
        error, text = found["scaler"]
        assert error == "RuntimeError"
        assert "parameter 0 in group 0" in text
        assert "model.clip_grad_norm_(max_norm)" in text
        assert found["untouched by the scaler"]
        error, text = found["release"]
        assert error == "TypeError"
        assert "parameter 0 in group 0" in text
        for mine, other in zip(*found["trained"], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


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
