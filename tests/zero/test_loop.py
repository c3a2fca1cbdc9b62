"""Whole training loops on several ranks: scalers, accumulation, misuse, volume."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import faststep
from faststep import zero
from ranks import on_ranks

from .common import Given, differences, grads_for, mean_of

SHAPES = [(200, 100), (100,), (40000,), (7,)]


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8))


def _batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 64, generator=made), torch.randn(16, 8, generator=made)


# ---- against DistributedDataParallel


def _like_ddp(rank: int, world: int, stage: Any, steps: int, how: str = "") -> None:
    losses: dict[str, list[float]] = {}
    values = []
    for kind in ("ddp", "sharded"):
        model = _model()
        optimizer: Any = faststep.optim.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.5)
        called: Any = model
        if kind == "ddp":
            called = DistributedDataParallel(model)
            quiet = called
        else:
            if how:
                called = DistributedDataParallel(
                    model, bucket_cap_mb=0.03, gradient_as_bucket_view=how == "views"
                )
            quiet = optimizer = zero.shard(called, optimizer, stage=stage, bucket_mb=0.02)
            if how == "wrapped":
                quiet = called
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        losses[kind] = []
        for step in range(8):
            for micro in range(steps):
                x, y = _batch(rank, step * steps + micro)
                if micro + 1 < steps:
                    with quiet.no_sync():
                        nn.functional.mse_loss(called(x), y).backward()
                else:
                    loss = nn.functional.mse_loss(called(x), y)
                    loss.backward()
            optimizer.step()
            scheduler.step()
            if how:  # a loop that reads `.grad` finds no values
                assert kind == "ddp" or model[0].weight.grad.data_ptr() == 0
            optimizer.zero_grad()
            losses[kind].append(loss.item())
        values.append([p.detach().clone() for p in model.parameters()])
    if world == 2:
        assert losses["ddp"] == losses["sharded"]
        assert differences(*values) == []
    else:
        assert max(float((a - b).abs().max()) for a, b in zip(*values, strict=True)) < 1e-4


@on_ranks(2, stage=(1, 2), steps=(1, 3))
def test_two_ranks_have_the_bits_of_ddp(rank: int, world: int, stage: Any, steps: int) -> None:
    _like_ddp(rank, world, stage, steps)


@on_ranks(2, how=("wrapped", "views"), steps=(1, 3))
def test_a_model_inside_ddp_is_taken_over(rank: int, world: int, how: str, steps: int) -> None:
    _like_ddp(rank, world, 2, steps, how)


@on_ranks(3)
def test_three_ranks_are_like_ddp(rank: int, world: int) -> None:
    _like_ddp(rank, world, 2, 1)


# ---- volume and memory


class _Counted:
    """Bytes that this rank sends to others, counted at the collectives."""

    def __init__(self, rank: int, world: int) -> None:
        self.sent = 0
        self.calls = 0
        self._rank, self._world = rank, world
        self._kept = {name: getattr(dist, name) for name in ("all_to_all_single", "isend")}
        self._kept["all_reduce"] = dist.all_reduce
        dist.all_to_all_single = self._exchange
        dist.isend = self._send
        dist.all_reduce = self._reduce

    def stop(self) -> None:
        for name, function in self._kept.items():
            setattr(dist, name, function)

    def _exchange(
        self,
        out: Tensor,
        sent: Tensor,
        outputs: list[int],
        inputs: list[int],
        *args: Any,
        **kw: Any,
    ) -> Any:
        self._count((sent.numel() - inputs[self._rank]) * sent.itemsize)
        return self._kept["all_to_all_single"](out, sent, outputs, inputs, *args, **kw)

    def _send(self, sent: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._count(sent.nbytes)
        return self._kept["isend"](sent, *args, **kwargs)

    def _reduce(self, numbers: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._count(2 * numbers.nbytes * (self._world - 1) // self._world)
        return self._kept["all_reduce"](numbers, *args, **kwargs)

    def _count(self, nbytes: int) -> None:
        self.sent += nbytes
        self.calls += 1


def _volume(
    rank: int, world: int, expected: float, micro: int, quiet: bool = True, wrapped: bool = False
) -> None:
    """What ranks send in a step of so many passes, in bytes of the parameters."""
    inside = Given([(700, 700), (700,), (300, 900), (512,)] * 3, [torch.float32])
    model: Any = DistributedDataParallel(inside) if wrapped else inside
    optimizer = zero.shard(
        model, torch.optim.AdamW(model.parameters()), bucket_mb=4, max_grad_norm=1.0
    )
    model(grads_for(model, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    counted = _Counted(rank, world)
    for step in range(micro):
        before = counted.calls
        if quiet and step + 1 < micro:
            with optimizer.no_sync():
                model(grads_for(model, rank, step)).backward()
            assert counted.calls == before
        else:
            model(grads_for(model, rank, step)).backward()
    optimizer.step()
    counted.stop()
    psi = sum(p.nbytes for p in model.parameters())
    if wrapped:  # what the reducer sends itself is not seen above; it would change the gradients
        assert all(p.grad.data_ptr() == 0 for p in model.parameters())
    padded = sum(b.layout.size * b.layout.dtype.itemsize for b in optimizer._engine.buckets)
    assert padded < 1.03 * psi
    sent = torch.tensor(counted.sent / padded)
    assert sent < 1.03 * expected
    dist.all_reduce(sent)
    assert float(sent) / world == pytest.approx(expected, rel=0.01)
    if micro == 1:
        held = [value.untyped_storage() for s in optimizer.state.values() for value in s.values()]
        states = sum({one.data_ptr(): one.nbytes() for one in held}.values())
        slices = sum(bucket.values.nbytes for bucket in optimizer._engine.buckets)
        assert states / psi == pytest.approx(2 / world, rel=0.05)
        assert slices / psi == pytest.approx(1 / world, rel=0.05)
        assert all(p.grad.data_ptr() == 0 for p in model.parameters())
        assert all(bucket._buffer is None for bucket in optimizer._engine.buckets)


@on_ranks(2, 4, micro=(1, 2, 8))
def test_volume_is_two_psi_and_memory_that_of_the_formula(
    rank: int, world: int, micro: int
) -> None:
    _volume(rank, world, 2 * (world - 1) / world, micro)


@on_ranks(2)
def test_volume_of_a_wrapped_model(rank: int, world: int) -> None:
    _volume(rank, world, 1.0, 2, wrapped=True)


@on_ranks(2)
def test_slices_per_micro_step_have_the_documented_volume(rank: int, world: int) -> None:
    _volume(rank, world, (8 + 1) / 2, 8, quiet=False)


# ---- accumulation


def _without_one(grads: list[Tensor], without: bool) -> list[Any]:
    return [None if number == 1 and without else grad for number, grad in enumerate(grads)]


def _accumulated(rank: int, world: int, stage: Any, quiet: str, wrapped: bool = False) -> None:
    """Micro-steps whose gradients add up; parameter 1 is used in the first one only."""
    inside, whole = Given(SHAPES, [torch.float32]), Given(SHAPES, [torch.float32])
    model: Any = DistributedDataParallel(inside) if wrapped else inside
    optimizer = zero.shard(model, faststep.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    reference = faststep.optim.SGD(whole.parameters(), lr=0.1)
    wrong = []
    for window in range(3):
        used = [
            [
                _without_one(grads_for(inside, r, micro, window), micro > 0 and not wrapped)
                for micro in range(3)
            ]
            for r in range(world)
        ]  # fmt: skip
        for micro in range(3):
            silent = quiet == "all" or (quiet == "most" and micro < 2)
            if silent:
                with optimizer.no_sync():
                    model(used[rank][micro]).backward()
            else:
                model(used[rank][micro]).backward()
        for number, param in enumerate(whole.parameters()):
            param.grad = _sum_of(used, number, quiet)
        optimizer.step()
        reference.step()
        wrong += [f"{window}, p{n}" for n in differences(model.parameters(), whole.parameters())]
        if window == 1:
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=window == 0)
        reference.zero_grad()
    assert not wrong, wrong


def _sum_of(used: list[list[list[Tensor | None]]], number: int, quiet: str) -> Tensor | None:
    """The mean over two ranks of the sums of three micro-steps, in the order of addition."""
    rows = [[micro[number] for micro in rank if micro[number] is not None] for rank in used]
    if quiet != "none":
        return mean_of([sum(row[1:], start=row[0]) for row in rows])
    total = None
    for parts in zip(*rows, strict=True):
        halves = [part * 0.5 for part in parts]
        total = halves[0] + halves[1] if total is None else (total + halves[0]) + halves[1]
    return total


QUIET = ("none", "most", "all")


@on_ranks(2, stage=(1, 2), quiet=QUIET)
def test_accumulation(rank: int, world: int, stage: Any, quiet: str) -> None:
    _accumulated(rank, world, stage, quiet)


@on_ranks(2, quiet=QUIET)
def test_accumulation_inside_ddp(rank: int, world: int, quiet: str) -> None:
    _accumulated(rank, world, 2, quiet, wrapped=True)
