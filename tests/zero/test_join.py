"""torch.distributed.algorithms.Join: ranks whose data end at other times."""

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import faststep
from faststep import zero
from ranks import on_ranks

from .common import check_error, differences


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(6, 64, generator=made)).square().mean()  # type: ignore[no-any-return]


def _train(rank: int, how: str) -> nn.Module:
    """Rank 0 has three batches, rank 1 has seven."""
    inside = _model()
    optimizer: Any = faststep.optim.AdamW(inside.parameters(), lr=0.01, max_grad_norm=0.1)
    is_bare = how in ("plain", "forward", "stage 1")
    model: Any = inside if is_bare else DistributedDataParallel(inside)
    if how == "ddp":
        joined = [model]
    else:
        gather: Any = "forward" if how == "forward" else "step"
        stage: Any = 1 if how == "stage 1" else 2
        optimizer = zero.shard(model, optimizer, stage=stage, bucket_mb=0.01, gather=gather)
        joined = [model, optimizer] if how == "wrapped" else [optimizer]
    quiet = model if how in ("ddp", "wrapped") else optimizer
    with Join(joined):
        for step in range(3 if rank == 0 else 7):
            with quiet.no_sync():
                _loss(model, rank, step + 50).backward()
            _loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    if how == "forward":
        optimizer.wait()
    return inside


@on_ranks(2)
def test_uneven_inputs_have_the_bits_of_ddp(rank: int, world: int) -> None:
    expected = _train(rank, "ddp")
    said = {
        how: differences(expected.parameters(), _train(rank, how).parameters())
        for how in ("plain", "stage 1", "forward", "wrapped")
    }
    assert said == {"plain": [], "stage 1": [], "forward": [], "wrapped": []}


@on_ranks(2)
def test_what_join_does_not_take(rank: int, world: int) -> None:
    model = _model()
    optimizer = zero.shard(model, faststep.optim.SGD(model.parameters(), lr=0.1))
    with contextlib.suppress(ZeroDivisionError), Join([optimizer]):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        check_error(optimizer.step, "a step without a backward pass inside of")
        optimizer.zero_grad()
        _loss(model, rank, 0).backward()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        for call in (
            lambda: optimizer.clip_grad_norm_(1.0),
            lambda: scaler.step(optimizer),
            lambda: scaler.unscale_(optimizer),
        ):
            check_error(call, "clip with max_grad_norm=")
        check_error(_loss(model, rank, 1).backward, "only one backward pass per step")
        raise ZeroDivisionError  # leave without waiting for the others
    wrapper = DistributedDataParallel(_model())
    second = zero.shard(wrapper, faststep.optim.SGD(wrapper.parameters(), lr=0.1))
    with contextlib.suppress(ZeroDivisionError), Join([second, wrapper]):
        check_error(lambda: _loss(wrapper, rank, 1).backward(), "Join([model, optimizer])")
        raise ZeroDivisionError
    third = _model()
    whole = zero.shard(third, faststep.optim.SGD(third.parameters(), lr=0.1), stage=3)
    check_error(lambda: Join([whole]), "fully_shard communicates in forward")
    again = _model()
    early = zero.shard(again, faststep.optim.SGD(again.parameters(), lr=0.1))

    def ends_early() -> None:
        with Join([early], throw_on_early_termination=True):
            for step in range(2 + rank):
                _loss(again, rank, step).backward()
                early.step()
                early.zero_grad()

    check_error(ends_early, "exhausted all inputs" if rank == 0 else "at least one rank")
