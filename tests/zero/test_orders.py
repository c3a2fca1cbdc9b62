"""Backward passes in which ranks reach parameters in different orders, or several times."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import faststep
from faststep import zero
from faststep.zero.hooks import reducer
from faststep.zero.hooks.gradient_buckets import GradientBucket
from ranks import on_ranks

from .common import Given, differences, grads_for, mean_of

SHAPES = [(300,), (20, 30), (7,), (20000,), (9, 9)]


@on_ranks(3, most=(2**25, 0))
def test_any_order_of_hooks(rank: int, world: int, most: int) -> None:
    """Every rank and step uses the parameters in an order of its own."""
    under_way: set[GradientBucket] = set()
    at_once = []
    send, receive = GradientBucket.send, GradientBucket.receive

    def sent(bucket: GradientBucket, *args: Any) -> None:
        send(bucket, *args)
        under_way.add(bucket)
        at_once.append(len(under_way))

    def received(bucket: GradientBucket) -> None:
        receive(bucket)
        under_way.remove(bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "MOST_UNDER_WAY", most)
        patch.setattr(GradientBucket, "send", sent)
        patch.setattr(GradientBucket, "receive", received)
        wrong = _steps_in_other_orders(rank, world)
    assert len(at_once) > 12
    assert most or max(at_once) == 1
    assert not wrong, wrong


def _steps_in_other_orders(rank: int, world: int) -> list[str]:
    model, whole = Given(SHAPES, [torch.float32]), Given(SHAPES, [torch.float32])
    optimizer = zero.shard(
        model, torch.optim.AdamW(model.parameters()), bucket_mb=1 / 1024, max_grad_norm=1.0
    )
    reference = faststep.optim.AdamW(whole.parameters(), max_grad_norm=1.0)
    wrong = []
    for step in range(6):
        grads = grads_for(model, rank, step)
        params = list(model.parameters())
        order = torch.randperm(5, generator=torch.Generator().manual_seed(10 * step + rank))
        sum((params[n] * grads[n]).sum() for n in order.tolist()).backward()
        parts = [grads_for(whole, r, step) for r in range(world)]
        for param, rows in zip(whole.parameters(), zip(*parts, strict=True), strict=True):
            param.grad = mean_of(rows)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
        wrong += [f"{step}, p{n}" for n in differences(model.parameters(), whole.parameters())]
    return wrong


class _Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if self.how == "none" or (number == 1 and self.how != "all reentrant"):
                x = layer(x).tanh()
            else:
                reentrant = self.how != "not reentrant"
                x = checkpoint(lambda y, m=layer: m(y).tanh(), x, use_reentrant=reentrant)
        return x


@on_ranks(2)
def test_checkpoints_of_both_kinds(rank: int, world: int) -> None:
    wrong = []
    results = {}
    for how in ("none", "not reentrant", "reentrant", "all reentrant"):
        model = _Checkpointed(how)
        optimizer = zero.shard(
            model, torch.optim.AdamW(model.parameters(), lr=0.01), bucket_mb=1 / 1024
        )
        for step in range(3):
            x = torch.randn(5, 24, generator=torch.Generator().manual_seed(step + 5 * rank))
            model(x.requires_grad_()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results[how] = list(model.parameters())
        wrong += [f"{how}: p{n}" for n in differences(results["none"], results[how])]
    assert not wrong, wrong


@on_ranks(2)
def test_several_backward_passes(rank: int, world: int) -> None:
    """Two losses, a failed backward, and gradients of a part of the model."""
    model = Given(SHAPES, [torch.float32])
    optimizer = zero.shard(model, faststep.optim.SGD(model.parameters(), lr=1.0), bucket_mb=0.02)
    before = [p.detach().clone() for p in model.parameters()]
    model([g if n < 2 else None for n, g in enumerate(grads_for(model, 1))]).backward()
    model([g if n >= 2 else None for n, g in enumerate(grads_for(model, 1))]).backward()
    optimizer.step()
    means = [mean_of([g] * world) for g in grads_for(model, 1)]
    expected = [b - m for b, m in zip(before, means, strict=True)]
    assert differences(model.parameters(), expected) == []
    optimizer.zero_grad()
    handle = model.p4.register_hook(_raise)  # the first one: nothing has been sent
    with contextlib.suppress(ValueError):
        model(grads_for(model, 2)).backward()
    handle.remove()
    optimizer.zero_grad()
    model(grads_for(model, 3)).backward()
    optimizer.step()
    expected = [
        b - mean_of([g] * world) for b, g in zip(expected, grads_for(model, 3), strict=True)
    ]
    assert differences(model.parameters(), expected) == []
    inputs = (model.p0,)
    loss = model(grads_for(model, 4))
    assert torch.equal(torch.autograd.grad(loss, inputs)[0], grads_for(model, 4)[0])


def _raise(_: Tensor) -> None:
    raise ValueError("planted")


@on_ranks(2, stage=(1, 2))
def test_a_step_after_a_backward_that_failed(rank: int, world: int, stage: Any) -> None:
    """It would use the gradients of a part of the model, as those of all of it."""
    said: dict[str, Any] = {}
    for number in range(len(SHAPES)):
        model = Given(SHAPES, [torch.float32])
        optimizer = zero.shard(
            model, faststep.optim.SGD(model.parameters(), lr=1.0), stage=stage, bucket_mb=0.02
        )
        before = [p.detach().clone() for p in model.parameters()]
        handle = getattr(model, f"p{number}").register_hook(_raise)
        with contextlib.suppress(ValueError):
            model(grads_for(model, 2)).backward()
        handle.remove()
        for name, use in (
            ("step", optimizer.step),
            ("clip", lambda made=optimizer: made.clip_grad_norm_(1.0)),
        ):
            try:
                use()
                said[f"{name} {number}"] = "done"
            except RuntimeError as error:
                said[f"{name} {number}"] = "backward" in str(error)
        assert differences(model.parameters(), before) == []
    # Where the first gradient fails, there are none.
    assert sorted(map(str, said.values())) == ["True"] * 8 + ["done"] * 2
