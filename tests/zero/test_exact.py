"""Sharded steps against the fused optimizer of one process that gets the same mean gradients."""

import math
from typing import Any

import torch
import torch.distributed as dist

from faststep import zero
from ranks import assert_alike, on_cases

from .common import (
    HOST,
    OTHERS,
    SHAPES,
    Given,
    Place,
    differences,
    grads_for,
    mean_of,
    optimizer_of,
    states_differ,
)

LOW = [torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.float64]
KB = 1 / 1024  # MiB


def _unused(case: dict[str, Any], rank: int, step: int, number: int) -> bool:
    """Parameter 1 is never used, 4 on even ranks only, 7 in every third step."""
    if not case.get("unused"):
        return False
    return number == 1 or (number == 4 and rank % 2 == 1) or (number == 7 and step % 3 > 0)


def _grads(case: dict[str, Any], model: Given, rank: int, step: int) -> list[Any]:
    grads = grads_for(model, rank, step, scale=0.01 if step % 4 == 3 else 1.0)
    return [
        None if _unused(case, rank, step, number) else grad for number, grad in enumerate(grads)
    ]


def _groups(rank: int, world: int, nodes: int) -> dict[str, Any]:
    """Groups of neighbours, and of the ranks with the same place among them."""
    if nodes == 1:
        return {}
    size = world // nodes
    inside = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    across = [dist.new_group(list(range(first, world, size))) for first in range(size)]
    return {"process_group": inside[rank // size], "replicate_group": across[rank % size]}


def check_run(rank: int, world: int, case: dict[str, Any], place: Place = HOST) -> None:
    """Train sharded, and as one process with the gradients of all ranks."""
    dtypes = case.get("dtypes", [torch.float32])
    model, whole = place.moved(Given(SHAPES, dtypes)), Given(SHAPES, dtypes)
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
    if name.startswith("torch SGD"):
        reference.param_groups[0]["momentum"] = 0.9
    by_hand = case.get("how") == "by hand"
    sharded = zero.shard(
        model, optimizer_of(name, half[0]), stage=case["stage"], bucket_mb=case["mb"],
        max_grad_norm=None if by_hand else clip,
        gather=case.get("gather", "step"),
        **_groups(rank, world, nodes),
    )  # fmt: skip
    if case.get("lr"):
        sharded.param_groups[0]["lr"] = place.claimed(torch.tensor(0.03))
        reference.param_groups[0]["lr"] = torch.tensor(0.03).item()
    wrong: list[str] = []
    norm = None
    for step in range(case.get("steps", 12)):
        versions = [p._version for p in model.parameters()]
        grads = _grads(case, model, rank, step)
        with place.without_waiting(step > 0 and not case.get("unused") and name != "momentum"):
            place.backward(model(grads))
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
        if case.get("gather") == "forward" and step % 2 == 0:
            model([None] * len(grads))  # waits
        else:
            sharded.wait()
        wrong += [f"step {step}, p{n}" for n in differences(model.parameters(), whole.parameters())]
        if clip is not None and not torch.equal(norm, expected):
            wrong.append(f"step {step}: norm {norm}, not {expected}")
        unrounded = (sharded if world > 1 else sharded._owned)._last_norm
        if place is HOST and clip is not None and not by_hand and unrounded != reference._last_norm:
            wrong.append(f"step {step}: unrounded norm {unrounded}")
        for number, param in enumerate(model.parameters() if place is HOST else ()):
            used = any(grads[number] is not None for grads in means)
            if (param._version > versions[number]) is not used:
                wrong.append(f"step {step}: version of p{number}")
        sharded.zero_grad()
        if any(p.grad is not None for p in model.parameters()):
            wrong.append(f"step {step}: gradients after zero_grad()")
    if case["optimizer"] != "int8":  # its scales are cut otherwise than other states
        wrong += states_differ(sharded, reference)
    assert not wrong, wrong
    if norm is not None:
        assert_alike([torch.tensor(float(norm))])


BASE = {"optimizer": "AdamW", "stage": 2, "mb": 0.1, "clip": 1.0}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{
        f"AdamW on {world}, {mb} MiB": (world, {**BASE, "mb": mb})
        for world in (1, 2, 3, 4)
        for mb in (KB, 0.1, math.inf)
    },
    **{
        f"{name} on 3": (3, {**BASE, "optimizer": name})
        for name in ("Adam", "SGD", "momentum", "Lion", "torch AdamW", "torch SGD")
    },
    **{f"torch {name} on 2": (2, {**BASE, "optimizer": f"torch {name}"}) for name in OTHERS},
    **{
        f"{name}, several dtypes": (3, {**BASE, "optimizer": name, "mb": KB, "dtypes": LOW})
        for name in OTHERS
    },
    "stage 1": (2, {**BASE, "stage": 1}),
    "stage 1 on 3": (3, {**BASE, "stage": 1, "unused": True}),
    "several dtypes on 2": (2, {**BASE, "dtypes": LOW}),
    "several dtypes on 3": (3, {**BASE, "dtypes": LOW, "mb": KB}),
    "unused": (2, {**BASE, "unused": True}),
    "unused on 4": (4, {**BASE, "unused": True, "mb": KB}),
    "without clipping": (2, {**BASE, "clip": None, "unused": True}),
    "groups": (3, {**BASE, "groups": True, "unused": True}),
    "clipped by hand": (2, {**BASE, "how": "by hand", "unused": True}),
    "in forward": (2, {**BASE, "gather": "forward", "optimizer": "momentum", "mb": KB}),
    "in forward, several dtypes": (
        3,
        {**BASE, "gather": "forward", "dtypes": LOW, "groups": True, "unused": True},
    ),
    "2 nodes": (4, {**BASE, "nodes": 2, "unused": True}),
    "2 nodes, several dtypes": (4, {**BASE, "nodes": 2, "dtypes": LOW, "stage": 1}),
    "2 nodes, in forward": (4, {**BASE, "gather": "forward", "nodes": 2, "mb": KB}),
    "2 nodes, by hand": (4, {**BASE, "nodes": 2, "how": "by hand", "optimizer": "momentum"}),
    "clipped by hand on 3": (3, {**BASE, "how": "by hand", "dtypes": LOW}),
}


@on_cases((world, name) for name, (world, _) in CASES.items())
def test_bits_of_one_process(rank: int, world: int, name: str) -> None:
    check_run(rank, world, CASES[name][1])
