"""Parameters whose memory a script exchanges or shares, against one process that does the same."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from faststep import zero
from ranks import on_ranks

from .common import Given, grads_for, optimizer_of
from .rounded import follow, step_whole

SHAPES = [(40, 50), (40, 50), (3,), (40, 50), (33000,), (0, 4), (), (5, 4, 3, 3)]
Kept = dict[str, Any]


def _exchange(one: Tensor, other: Tensor) -> None:
    one.data, other.data = other.data, one.data


def _exchange_all(model: nn.Module, other: nn.Module) -> None:
    for p, e in zip(model.parameters(), other.parameters(), strict=True):
        _exchange(p, e)


def _swapped(model: Given, other: Given, kept: Kept, step: int) -> None:
    if step in (1, 2, 4):
        _exchange_all(model, other)


def _swapped_always(model: Given, other: Given, kept: Kept, step: int) -> None:
    _exchange_all(model, other)


def _shown(model: Given, other: Given, kept: Kept, step: int) -> None:
    _exchange_all(model, other)
    kept[f"sum {step}"] = sum(p.detach().double().sum() for p in model.parameters())
    _exchange_all(model, other)


def _one(model: Given, other: Given, kept: Kept, step: int) -> None:
    if step % 2:
        _exchange(model.p0, other.p0)


def _inside(model: Given, other: Given, kept: Kept, step: int) -> None:
    if step % 2:
        _exchange(model.p0, model.p1)


def _rotated(model: Given, other: Given, kept: Kept, step: int) -> None:
    p, q, r, e = model.p0, model.p1, model.p3, other.p0
    p.data, q.data, r.data, e.data = q.data, r.data, e.data, p.data


def _seen(model: Given, other: Given, kept: Kept, step: int) -> None:
    """The script keeps what shares memory with parameters, of which one is exchanged."""
    if step == 1:
        kept["seen"] = [p.data for p in model.parameters()]
        kept["storage"] = model.p4.untyped_storage()
        _exchange(model.p0, other.p0)
        model.p4.data = model.p4.data * 2.0
    if step == 3:
        _exchange(model.p1, other.p1)


def _tied(model: Given, other: Given, kept: Kept, step: int) -> None:
    if step == 1:
        for p, e in zip(model.parameters(), other.parameters(), strict=True):
            p.data = e.data
    if step == 3:
        other.p0.data = other.p0.data.clone()


def _flattened(model: Given, other: Given, kept: Kept, step: int) -> None:
    """The parameters become parts of one tensor, some with other strides."""
    if step == 1:
        kept["flat"] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        at = 0
        for p in model.parameters():
            p.data = kept["flat"][at : at + p.numel()].view(p.shape)
            at += p.numel()
    if step == 4:
        del kept["flat"]


def _shared(model: Given, other: Given, kept: Kept, step: int) -> None:
    if step == 1:
        kept["seen"] = [p.data for p in model.parameters()]
        model.share_memory()  # type: ignore[no-untyped-call]
    if step == 3:
        _exchange(model.p0, other.p0)


def _late(model: Given, other: Given, kept: Kept, step: int) -> None:
    """Called after the step, when parameters may still arrive."""
    _exchange_all(model, other)


def _scaled(model: Given, other: Given, kept: Kept, step: int) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


ACTS = {act.__name__[1:]: act for act in (
    _swapped, _swapped_always, _shown, _one, _inside, _rotated, _seen, _tied, _flattened, _shared,
    _late, _scaled,
)}  # fmt: skip
HOWS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1, "bucket_mb": 0.02},
    "stage 2": {"bucket_mb": 100.0, "max_grad_norm": 1.0},
    "bf16": {"master_weights": True, "bucket_mb": 0.02},
    "in DDP": {"bucket_mb": 0.02},
    "in forward": {"gather": "forward", "bucket_mb": 0.1},
    "in forward, bf16": {"gather": "forward", "master_weights": True},
}


def _kept(kept: Kept) -> list[Tensor]:
    """What the script kept, as tensors."""
    values: list[Tensor] = []
    for it in kept.values():
        if isinstance(it, torch.UntypedStorage):
            it = torch.empty(0, dtype=torch.uint8).set_(it)  # type: ignore[call-overload]
        values += it if isinstance(it, list) else [it]
    return [value.clone() for value in values]


@on_ranks(2, act=ACTS, how=HOWS)
def test_moved_parameters(rank: int, world: int, act: str, how: str) -> None:
    options = HOWS[how]
    dtype = torch.bfloat16 if options.get("master_weights") else torch.float32
    model, mirror, other, other_mirror = (Given(SHAPES, [dtype]) for _ in range(4))
    whole = Given(SHAPES, [torch.float32])
    with torch.no_grad():
        for p, wide in zip(model.parameters(), whole.parameters(), strict=True):
            wide.copy_(p)
        for e in (*other.parameters(), *other_mirror.parameters()):
            e.mul_(-3.0)
    called = DistributedDataParallel(model) if how == "in DDP" else model
    sharded = zero.shard(called, optimizer_of("AdamW", model.parameters()), **options)
    reference = optimizer_of("AdamW", whole.parameters())
    reference.max_grad_norm = options.get("max_grad_norm")
    kept: Kept = {}
    kept_mirror: Kept = {}
    wrong: list[str] = []
    addresses = set()
    for step in range(6):
        if act != "late":
            ACTS[act](model, other, kept, step)
            ACTS[act](mirror, other_mirror, kept_mirror, step)
        follow(whole, mirror)
        called(grads_for(model, rank, step)).backward()
        sharded.step()
        sharded.zero_grad()
        step_whole(whole, reference, [grads_for(model, r, step) for r in range(world)])
        with torch.no_grad():
            for p, wide in zip(mirror.parameters(), whole.parameters(), strict=True):
                p.copy_(wide)
        if act == "late":
            _late(model, other, kept, step)
            _late(mirror, other_mirror, kept_mirror, step)
        sharded.wait()
        for what, mine, theirs in (
            ("model", [*model.parameters()], [*mirror.parameters()]),
            ("other", [*other.parameters()], [*other_mirror.parameters()]),
            ("kept", _kept(kept), _kept(kept_mirror)),
        ):
            for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                if not torch.equal(a, b):
                    wrong.append(f"step {step}: {what} {number}")
        addresses.add(tuple(p.data_ptr() for p in model.parameters()))
    state = sharded.state_dict()["state"]
    wanted = reference.state_dict()["state"]
    wrong += [
        f"{key} of p{number}"
        for number in (state if rank == 0 else ())
        for key in ("exp_avg", "exp_avg_sq")
        if not torch.equal(state[number][key], wanted[number][key])
    ]
    assert not wrong, wrong
    if act in ("shown", "scaled"):
        assert len(addresses) == 1
