"""accumulate on sharded parameters: right, or an error that names one."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

import faststep
import faststep.optim
import faststep.zero
from ranks import on_ranks

from .common import backward, check_close, fully_sharded, local, locals_of, net

MICRO = 3
LIMIT = 0.2
WAYS: tuple[tuple[Any, str, Any], ...] = (
    ("mean", "", faststep.optim.AdamW),
    ("mean", "", torch.optim.AdamW),
    ("mean", "inside", faststep.optim.AdamW),
    ("mean", "window", faststep.optim.AdamW),
    ("tokens", "", faststep.optim.AdamW),
    ("sum", "window", torch.optim.AdamW),
)


@on_ranks(2)
def test_windows(rank: int, world: int) -> None:
    """A window without model= gives the mean of gradients that FSDP2 has reduced each time."""
    for cls, clips in (
        (faststep.optim.AdamW, ("", "inside", "function")),
        (torch.optim.AdamW, ("", "window")),
    ):
        for clip in clips:
            model, other = fully_sharded(), fully_sharded()
            inside = {"max_grad_norm": LIMIT} if clip == "inside" else {}
            optimizer: Any = cls(model.parameters(), lr=0.1, **inside)
            reference = torch.optim.AdamW(other.parameters(), lr=0.1)
            accum = faststep.accumulate(optimizer, MICRO)
            for step in range(2 * MICRO):
                with accum:
                    backward(model, rank, step, 2.0)
                backward(other, rank, step, 2.0 / MICRO)
                if not accum.ready:
                    continue
                if clip == "window":
                    accum.clip_grad_norm_(LIMIT)
                elif clip == "function":
                    faststep.clip_grad_norm_(model.parameters(), LIMIT)
                if clip:
                    torch.nn.utils.clip_grad_norm_(other.parameters(), LIMIT)
                for one in (optimizer, reference):
                    one.step()
                    one.zero_grad()
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                check_close(mine, theirs, f"{clip} {cls}")
            accum.remove()


@on_ranks(2, 4)
def test_windows_by_model(rank: int, world: int) -> None:
    """With model= only the last micro-step communicates, as by set_requires_gradient_sync."""
    names = ("replicate", "shard")
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if world == 4 else None
    options = {} if square is None else {"mesh": square}
    for normalize, clip, cls in WAYS if square is None else WAYS[2:]:
        model, other = fully_sharded(**options), fully_sharded(**options)
        inside = {"max_grad_norm": LIMIT} if clip == "inside" else {}
        optimizer: Any = cls(model.parameters(), lr=0.1, **inside)
        reference = torch.optim.AdamW(other.parameters(), lr=0.1)
        accum = faststep.accumulate(optimizer, MICRO, model=model, normalize=normalize)
        for count in (MICRO, MICRO - 1):  # the last window is shorter
            divisor = 1.0 if normalize == "sum" else count
            for step in range(count):
                assert all(param.grad is None for param in model.parameters())
                with accum:
                    backward(model, rank, step, 2.0)
                    if normalize == "tokens":
                        accum.add_count(rank + 0.5)
                        divisor = count * world / 2
                last = step == count - 1
                other.set_requires_gradient_sync(last)  # type: ignore[operator]
                backward(other, rank, step, 2.0 / divisor)
            assert accum.ready or accum.flush()
            if clip == "window":
                accum.clip_grad_norm_(LIMIT)
            if clip:
                torch.nn.utils.clip_grad_norm_(other.parameters(), LIMIT)
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                check_close(mine, theirs, f"{normalize} {clip}")
        accum.remove()


@on_ranks(2)
def test_windows_that_fail(rank: int, world: int) -> None:
    """What a dropped window has left inside FSDP2 is no part of the next one."""
    results = []
    for fails in (False, True):
        model = fully_sharded()
        optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
        accum = faststep.accumulate(optimizer, 2, model=model)
        if fails:
            with accum:
                backward(model, rank, 7)
            with pytest.raises(RuntimeError, match="inside FSDP2"):
                accum.state_dict()
            with contextlib.suppress(ValueError), accum:
                raise ValueError
            accum.reset()
        for step in range(4):
            with accum:
                backward(model, rank, step)
            if accum.ready:
                assert accum.state_dict()["gradients"]
                optimizer.step()
                optimizer.zero_grad()
        results.append(locals_of(model.parameters()))
        assert not accum.flush()
    assert all(map(torch.equal, *results))


@on_ranks(2)
def test_in_float32(rank: int, world: int) -> None:
    """The parts of bf16 gradients are added up in fp32, on FSDP2 and on tensor parallelism."""
    count = 6
    for in_pairs in (False, True):
        for cls in (faststep.optim.SGD, torch.optim.SGD):
            model = fully_shard(net().bfloat16())
            optimizer = cls(model.parameters(), lr=1.0)
            before = locals_of(model.parameters())
            sums = [torch.zeros(part.shape) for part in before]
            for step in range(count):
                backward_in_bfloat16(model, rank, step)
                for total, param in zip(sums, model.parameters(), strict=True):
                    total += local(param.grad).float()
                optimizer.zero_grad()
            accum = faststep.accumulate(optimizer, count, dtype=torch.float32, in_pairs=in_pairs)
            for _ in range(2):
                for step in range(count):
                    with accum:
                        backward_in_bfloat16(model, rank, step)
                assert accum.ready
                for total, param in zip(sums, model.parameters(), strict=True):
                    assert isinstance(param.grad, DTensor)
                    if cls is faststep.optim.SGD:
                        assert param.grad.dtype == torch.float32
                        torch.testing.assert_close(local(param.grad), total, rtol=1e-6, atol=1e-7)
                    else:
                        mean = (total / count).bfloat16()
                        torch.testing.assert_close(local(param.grad), mean)
                params = locals_of(model.parameters())
                optimizer.step()
                for old, total, param in zip(params, sums, model.parameters(), strict=True):
                    new = (old.float() - total / count).bfloat16()
                    torch.testing.assert_close(*locals_of([param]), new, rtol=1e-2, atol=1e-2)
                with torch.no_grad():
                    for param, value in zip(model.parameters(), before, strict=True):
                        local(param).copy_(value)
                optimizer.zero_grad()
            accum.remove()


def backward_in_bfloat16(model: nn.Module, rank: int, step: int) -> None:
    source = torch.Generator().manual_seed(100 * rank + step)
    model(torch.randn(4, 6, generator=source).bfloat16()).float().square().mean().backward()


@on_ranks(2)
def test_installed(rank: int, world: int) -> None:
    """An unchanged loop, over a model that calls fully_shard itself and one of shard(stage=3)."""
    results = []
    for how in ("torch", "installed", "stage 3"):
        model = net() if how == "stage 3" else fully_sharded()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        if how == "stage 3":
            blocks = [layer for layer in model if list(layer.parameters())]
            optimizer = faststep.zero.shard(model, optimizer, stage=3, blocks=blocks)
        if how != "torch":
            faststep.accumulate(optimizer, MICRO, model=model).install()
        for step in range(2 * MICRO):
            last = step % MICRO == MICRO - 1
            if how == "torch":
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            backward(model, rank, step, 1.0 / MICRO if how == "torch" else 1.0)
            assert last is any(param.grad is not None for param in model.parameters())
            if how != "torch" or last:
                optimizer.step()
                optimizer.zero_grad()
        results.append(locals_of(model.parameters()))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other)


@on_ranks(2)
def test_refused(rank: int, world: int) -> None:
    low = fully_shard(net().bfloat16())
    of_low = faststep.optim.SGD(low.named_parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"'0\.weight'.*leave model= away"):
        faststep.accumulate(of_low, 2, model=low, dtype=torch.float32)
