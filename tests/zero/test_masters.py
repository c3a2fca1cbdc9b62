"""master_weights=True against one process that keeps fp32 parameters and rounds them."""

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import faststep
from faststep import zero
from faststep.optim.masters import MASTER
from ranks import on_cases, on_ranks

from .common import OTHERS, SHAPES, Given, grads_for, optimizer_of
from .rounded import DTYPES, follow, step_whole, unlike, wide_of
from .test_exact import _groups

BASE = {"optimizer": "AdamW", "clip": 1.0}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"AdamW on {world}": (world, BASE) for world in (1, 2, 3)},
    "one bucket": (2, {**BASE, "mb": math.inf}),
    "stage 1": (2, {**BASE, "stage": 1, "mb": 1 / 1024}),
    **{f"{name} on 2": (2, {**BASE, "optimizer": name}) for name in ("Adam", "momentum", "Lion")},
    **{f"{name} on 2": (2, {**BASE, "optimizer": name}) for name in OTHERS},
    "SGD on 1": (1, {"optimizer": "SGD"}),
    "SGD on 3": (3, {"optimizer": "SGD"}),
    "in forward": (2, {**BASE, "gather": "forward"}),
    "in forward on 3": (3, {**BASE, "gather": "forward", "mb": 1 / 1024}),
    "2 nodes": (4, {**BASE, "nodes": 2}),
}


@on_cases((world, name) for name, (world, _) in CASES.items())
def test_bits_of_rounded_fp32_parameters(rank: int, world: int, name: str) -> None:
    case = CASES[name][1]
    model = Given(SHAPES, DTYPES)
    whole = wide_of(model)
    reference = optimizer_of(case["optimizer"], whole.parameters())
    reference.max_grad_norm = case.get("clip")
    nodes = case.get("nodes", 1)
    sharded = zero.shard(
        model, optimizer_of(case["optimizer"], model.parameters()), master_weights=True,
        bucket_mb=case.get("mb", 0.1), stage=case.get("stage", 2), max_grad_norm=case.get("clip"),
        gather=case.get("gather", "step"),
        **_groups(rank, world, nodes),
    )  # fmt: skip
    wrong: list[str] = []
    for step in range(12):
        model(grads_for(model, rank, step)).backward()
        sharded.step()
        sharded.zero_grad()
        sharded.wait()
        step_whole(whole, reference, [grads_for(model, r, step) for r in range(world)], nodes)
        pairs = zip(model.named_parameters(), whole.parameters(), strict=True)
        wrong += [
            f"step {step}: {name}"
            for (name, param), wide in pairs
            if not torch.equal(param, wide.to(param.dtype))
        ]
        if case.get("clip") is not None:
            norm = (sharded if world > 1 else sharded._owned)._last_norm
            if norm != reference._last_norm:
                wrong.append(f"step {step}: norm {norm}")
        if step == 5:  # a script writes parameters behind the back of their version counters
            model.p0.data[7] *= 0.5
            model.p3.data = model.p3.data.clone()
            model.p7.data.copy_(model.p7.data.clamp(-0.1, 0.1))
            follow(whole, model)
    wrong += unlike(sharded, model, whole, reference)
    assert not wrong, wrong


@on_ranks(2)
def test_memory_and_ranks_that_differ(rank: int, world: int) -> None:
    for dtype, share in ((torch.bfloat16, 6 / 2), (torch.float32, 2 / 2)):
        model = Given([(1000, 100), (70000,)], [dtype])
        sharded = zero.shard(
            model, torch.optim.AdamW(model.parameters()), master_weights=True, bucket_mb=0.1
        )
        model(grads_for(model, 1)).backward()
        sharded.step()
        held = sum(t.nbytes for s in sharded.state.values() for k, t in s.items() if k != "step")
        assert held / sum(p.nbytes for p in model.parameters()) == pytest.approx(share, rel=0.05)
    fresh = Given(SHAPES, DTYPES)
    differ = "rank 1 has stage 2.*master_weights True"
    with pytest.raises(RuntimeError, match=differ):
        zero.shard(fresh, torch.optim.SGD(fresh.parameters()), master_weights=rank == 1)


def _alone(optimizer: str = "AdamW") -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).bfloat16())
    return model, zero.shard(
        model, optimizer_of(optimizer, model.parameters()), master_weights=True
    )


def _set_grads(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.001)


def test_small_changes_add_up_and_a_script_may_write_parameters() -> None:
    model, optimizer = _alone("SGD")
    start = model[1].bias.detach().clone()
    for _ in range(50):  # steps of 1e-4, which bf16 would round away
        _set_grads(model)
        optimizer.step()
    moved = (start.float() - model[1].bias.float()).detach()
    torch.testing.assert_close(moved, torch.full((2,), 0.005), rtol=0.3, atol=0.001)
    for rewrite in (0.75, 3.0, -1.5):
        model[1].bias.data.fill_(rewrite)
        _set_grads(model)
        optimizer.step()
        master = optimizer.state[model[1].bias][MASTER]
        torch.testing.assert_close(master, torch.full((2,), rewrite - 0.0001))
    assert MASTER not in optimizer.state[model[0].bias]


def test_states_that_do_not_fit_are_named() -> None:
    model, optimizer = _alone()
    _set_grads(model)
    optimizer.step()
    state = optimizer.state[model[1].weight]
    kept = {key: value.clone() for key, value in state.items()}
    state[MASTER] = state[MASTER].bfloat16()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"state 'master_weights' of parameter 2 .*of type float32;"
    ):
        optimizer.step()
    state.update(kept, exp_avg=kept["exp_avg"].int())
    with pytest.raises(RuntimeError, match=r"state 'exp_avg' of parameter 2 .* or float16;"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    state["exp_avg"] = kept["exp_avg"]
    del state[MASTER]  # begins as the parameter
    optimizer.step()
    assert state[MASTER].dtype == torch.float32
    del state["exp_avg_sq"]
    with pytest.raises(KeyError, match="has no 'exp_avg_sq'"):
        optimizer.step()


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_operators_of_torch_know_no_masters() -> None:
    model, optimizer = _alone()
    _set_grads(model)
    with _Watching(), pytest.raises(RuntimeError, match="in a TorchDispatchMode; nothing"):
        optimizer.step()
    assert not optimizer.state


@on_ranks(2)
def test_micro_batches_add_up_in_fp32(rank: int, world: int) -> None:
    """512 backward passes of 1/512, which bf16 sums would stop to count at 0.5."""
    said = {}
    for stage, how in ((1, "each"), (2, "each"), (1, "accumulate"), (2, "accumulate")):
        model = nn.Linear(8, 8).bfloat16()
        before = [p.detach().float() for p in model.parameters()]
        sharded = zero.shard(
            model, torch.optim.SGD(model.parameters(), lr=1.0), master_weights=True, stage=stage
        )
        passes = 512 if how == "each" else 64
        accum = None
        if how == "accumulate":
            accum = faststep.accumulate(
                sharded, passes, normalize="sum", dtype=torch.float32, model=model
            )
        for _ in range(passes):
            with accum or contextlib.nullcontext():
                sum(p.sum() for p in model.parameters()).mul(1 / passes).backward()  # type: ignore[union-attr]
        norm = sharded.clip_grad_norm_(100.0)
        sharded.step()
        moved = [
            float((b - 1.0 - p.float()).abs().max())
            for b, p in zip(before, model.parameters(), strict=True)
        ]
        said[f"{how} {stage}"] = max(moved), float(norm)
    for moved, norm in said.values():
        assert moved < 0.01, said
        assert norm == pytest.approx(72**0.5, rel=4e-3)
