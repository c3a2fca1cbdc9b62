"""faststep.zero over NCCL with one rank: all that one GPU can show of it.

A single rank takes the ordinary fused step. Here it shards with itself, so that all collectives are
called: each rank's slice is everything.
"""

import datetime
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import faststep
from faststep import zero
from zero.common import Given, differences, grads_for

from .common import REHEARSAL, no_synchronization, scalers

pytestmark = pytest.mark.skipif(
    not (REHEARSAL or (dist.is_available() and dist.is_nccl_available())),
    reason="torch has no NCCL",
)
SHAPES = [(200, 100), (100,), (40000,), (7,), (), (0, 3)]


@pytest.fixture
def one_rank(machine: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process, with NCCL or what stands in for it."""
    dist.init_process_group(
        "gloo" if REHEARSAL else "nccl", store=dist.HashStore(), rank=0, world_size=1,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    ranks = None
    if REHEARSAL:
        from device import fake, nccl

        ranks = nccl.start(monkeypatch, fake.Machine())
    else:
        torch.cuda.set_device(0)
        building = importlib.import_module("faststep.zero.build")
        made = zero.transport.group.Group(dist.group.WORLD, 60)
        monkeypatch.setattr(building, "group_of", lambda *_: made)
    yield
    if ranks is not None:
        ranks.close()
    dist.destroy_process_group()


def models(*dtypes: torch.dtype) -> tuple[Any, Given]:
    """The same on the device and on the host."""
    model, whole = Given(SHAPES, dtypes), Given(SHAPES, dtypes)
    if REHEARSAL:
        from device.test_sharded import on_device

        return on_device(model), whole
    return model.to("cuda"), whole


def backward(loss: torch.Tensor) -> None:
    loss.as_subclass(torch.Tensor).backward()  # on real hardware it is a plain tensor anyway


def give(whole: Given, grads: list[torch.Tensor], factor: float = 1.0) -> None:
    for param, grad in zip(whole.parameters(), grads, strict=True):
        param.grad = torch.empty_like(param).copy_(grad * factor)


def on_host(model: Any) -> list[torch.Tensor]:
    return [param.detach().cpu() for param in model.parameters()]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("gather", ["step", "forward"])
def test_steps(stage: Any, gather: Any) -> None:
    model, whole = models(torch.float32, torch.bfloat16)
    optimizer = zero.shard(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=stage, bucket_mb=0.1,
        gather=gather, max_grad_norm=1.0,
    )  # fmt: skip
    reference = faststep.optim.AdamW(whole.parameters(), lr=0.01, max_grad_norm=1.0)
    model(grads_for(model, 0))  # forward learns which modules are called
    for step in range(5):
        grads = grads_for(model, step)
        if step:
            with no_synchronization():
                backward(model(grads))
                optimizer.step()
                optimizer.zero_grad()
        else:
            backward(model(grads))
            optimizer.step()
            optimizer.zero_grad()
        give(whole, grads_for(whole, step))
        reference.step()
        optimizer.wait()
        assert not differences(on_host(model), whole.parameters())
    assert torch.equal(optimizer.last_grad_norm.cpu(), reference.last_grad_norm)


@pytest.mark.usefixtures("one_rank")
def test_a_scaler_skips_without_waiting() -> None:
    model, whole = models(torch.float32)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), bucket_mb=0.1)
    reference = faststep.optim.AdamW(whole.parameters(), lr=0.01)
    other, scaler = scalers(init_scale=1024.0, growth_interval=3)
    for step in range(6):
        grads, wanted = grads_for(model, step), grads_for(whole, step)
        if step == 2:
            grads[2][5] = wanted[2][5] = float("inf")
        if step:
            with no_synchronization():
                backward(scaler.scale(model(grads)))
                scaler.step(optimizer, max_norm=1.0)
                scaler.update()
        else:
            backward(scaler.scale(model(grads)))
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
        give(whole, wanted, other.get_scale())
        other.step(reference, max_norm=1.0)
        other.update()
        assert optimizer.step_was_skipped is (step == 2)
        optimizer.zero_grad()
        assert scaler.get_scale() == other.get_scale()
        assert not differences(on_host(model), whole.parameters())


@pytest.mark.usefixtures("one_rank")
def test_state_dicts() -> None:
    model, whole = models(torch.float32)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), bucket_mb=0.1)
    reference = faststep.optim.AdamW(whole.parameters(), lr=0.01)
    for step in range(4):
        backward(model(grads_for(model, step)))
        optimizer.step()
        optimizer.zero_grad()
        give(whole, grads_for(whole, step))
        reference.step()
        if step == 1:
            optimizer.load_state_dict(reference.state_dict())
    saved, wanted = optimizer.state_dict()["state"], reference.state_dict()["state"]
    for key, state in wanted.items():
        for name, value in state.items():
            assert torch.equal(saved[key][name].cpu(), value)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.skipif(REHEARSAL, reason="the simulated device has no allocator of torch's")
def test_gradients_are_freed_at_stage_2() -> None:
    """Backward holds 32 MiB of buckets that are sent, one that is filled, and one gradient."""
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(32)]
    model = torch.nn.Sequential(*layers).to("cuda")
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=4)
    data = torch.randn(8, 1024, device="cuda")
    for _ in range(3):
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(data).square().mean().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20  # of 128 in all
