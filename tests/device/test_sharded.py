"""Sharded steps on the fake device, against the fused optimizer on the same mean gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from faststep import zero
from ranks import Job
from zero.common import OTHERS, SHAPES, Given, differences, mean_of, optimizer_of, states_differ
from zero.test_exact import LOW, _grads, _groups

from . import fake, nccl

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
KB = 1 / 1024  # MiB


@contextlib.contextmanager
def machine() -> Iterator[nccl.Nccl]:
    """A fake machine for one job, of which nobody complains."""
    with pytest.MonkeyPatch.context() as patch:
        started = fake.start(patch)
        assert started.complaint() is None
        ranks = nccl.start(patch, started)
        yield ranks
        ranks.close()
        fake.free_allocated()
        assert started.complaint() is None


def on_device(model: nn.Module) -> nn.Module:
    for name, param in list(model.named_parameters(recurse=False)):
        moved = torch.empty_strided(param.size(), param.stride(), dtype=param.dtype)
        moved.copy_(param.detach())
        setattr(model, name, nn.Parameter(fake.claim(moved)))
    for child in model.children():
        on_device(child)
    return model


def backward(loss: torch.Tensor) -> None:
    """Hooks then see torch's functions as the script does, which a subclass would turn off."""
    loss.as_subclass(torch.Tensor).backward()


@contextlib.contextmanager
def without_waiting(is_wanted: bool) -> Iterator[None]:
    fake.waiting_is_an_error = is_wanted
    try:
        yield
    finally:
        fake.waiting_is_an_error = False


def _run(rank: int, world: int, case: dict[str, Any]) -> dict[str, Any]:
    with machine(), pytest.MonkeyPatch.context() as patch:
        if "room" in case:
            patch.setattr(zero.hooks.reducer, "MOST_UNDER_WAY", case["room"])
        return _steps(rank, world, case)


def _steps(rank: int, world: int, case: dict[str, Any]) -> dict[str, Any]:
    dtypes = case.get("dtypes", [torch.float32])
    model, whole = on_device(Given(SHAPES, dtypes)), Given(SHAPES, dtypes)
    if rank:  # rank 0's values are those that count
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
    name, clip, nodes = case["optimizer"], case.get("clip"), case.get("nodes", 1)
    groups = [list(m.parameters()) for m in (model, whole)]
    half = [
        [{"params": some[4:], "lr": 0.003}, {"params": some[:4]}] if case.get("groups") else some
        for some in groups
    ]
    reference = optimizer_of(name.removeprefix("torch "), half[1])
    by_hand = case.get("how") == "by hand"
    sharded = zero.shard(
        model, optimizer_of(name, half[0]), stage=case["stage"], bucket_mb=case["mb"],
        max_grad_norm=None if by_hand else clip,
        gather=case.get("gather", "step"),
        **_groups(rank, world, nodes),
    )  # fmt: skip
    if case.get("lr"):
        sharded.param_groups[0]["lr"] = fake.claim(torch.tensor(0.03))
        reference.param_groups[0]["lr"] = torch.tensor(0.03).item()
    wrong: list[str] = []
    norm = None
    for step in range(case.get("steps", 6)):
        grads = _grads(case, model, rank, step)
        with without_waiting(step > 0 and not case.get("unused") and name != "momentum"):
            backward(model(grads))
            if by_hand:
                norm = sharded.clip_grad_norm_(clip)
            sharded.step()
        means = [_grads(case, whole, r, step) for r in range(world)]
        for param, parts in zip(whole.parameters(), zip(*means, strict=True), strict=True):
            param.grad = mean_of(parts, nodes)
            if param.grad is not None:
                param.grad = torch.empty_like(param).copy_(param.grad)
        if by_hand:
            expected = zero.optimizer.clip_grad_norm_(list(whole.parameters()), clip)
        else:
            reference.max_grad_norm = clip
        reference.step()
        if clip is not None and not by_hand:
            norm, expected = sharded.last_grad_norm, reference.last_grad_norm
        if case.get("gather") == "forward" and step % 2:
            sharded.wait()
        elif case.get("gather") == "forward":
            model([None] * len(grads))  # waits
        wrong += [f"step {step}, p{n}" for n in differences(model.parameters(), whole.parameters())]
        if clip is not None and not torch.equal(norm, expected):
            wrong.append(f"step {step}: norm {norm}, not {expected}")
        sharded.zero_grad()
    wrong += states_differ(sharded, reference)
    return {"wrong": wrong, "norm": None if norm is None else float(norm)}


BASE = {"optimizer": "AdamW", "stage": 2, "mb": 0.1}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{
        f"AdamW on {world}, {mb} MiB": (world, {**BASE, "mb": mb})
        for world, mb in ((1, 0.1), (2, KB), (2, 0.1), (3, 0.1), (3, math.inf))
    },
    "stage 1": (2, {**BASE, "stage": 1}),
    "unused": (3, {**BASE, "unused": True, "mb": KB}),
    "momentum": (2, {**BASE, "optimizer": "momentum"}),
    "Lion": (2, {**BASE, "optimizer": "Lion", "groups": True}),
    **{name: (2, {**BASE, "optimizer": name, "dtypes": LOW}) for name in OTHERS},
    "several dtypes": (3, {**BASE, "dtypes": LOW}),
    "clipped": (3, {**BASE, "clip": 1.0}),
    "clipped, one bucket": (2, {**BASE, "clip": 1e-6, "mb": math.inf, "stage": 1}),
    "clipped, small buckets": (4, {**BASE, "clip": 1.0, "mb": KB, "unused": True}),
    "clipped by hand": (2, {**BASE, "clip": 1.0, "how": "by hand", "dtypes": LOW}),
    "clipped alone": (1, {**BASE, "clip": 1.0}),
    "2 nodes": (4, {**BASE, "clip": 1.0, "nodes": 2, "unused": True}),
    "learning rate on the device": (2, {**BASE, "clip": 1.0, "lr": True}),
    "in forward": (2, {**BASE, "clip": 1.0, "gather": "forward"}),
    "in forward, stage 1": (3, {**BASE, "gather": "forward", "stage": 1, "dtypes": LOW}),
    "little room": (2, {**BASE, "mb": KB, "room": 50_000}),
}
CUDA_JOBS = [Job(f"cuda: {name}", world, _run, (case,)) for name, (world, case) in CASES.items()]
Ranks = Callable[[str], list[Any]]


def test_the_norm_has_the_same_bits_on_every_rank(cuda_ranks: Ranks) -> None:
    for name, (_, case) in CASES.items():
        if case.get("clip") is not None:
            assert len({result["norm"] for result in cuda_ranks(f"cuda: {name}")}) == 1, name


@pytest.mark.parametrize("name", CASES)
def test_bits_of_one_process(name: str, cuda_ranks: Ranks) -> None:
    results = cuda_ranks(f"cuda: {name}")
    assert [result["wrong"] for result in results] == [[]] * len(results)
