"""Loops over a sharded model on the fake device: scalers, accumulation, state dicts, DDP."""

import _thread
import contextlib
import copy
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import faststep
from faststep import zero
from faststep._torch.ddp import is_inside_backward
from ranks import on_cuda_ranks
from zero.common import SHAPES as ALL_SHAPES
from zero.common import Given, differences, grads_for, mean_of, optimizer_of, states_differ
from zero.test_scalers import OPTIONS, SCALED, check_scaled

from . import fake
from .common import scaler_on
from .test_sharded import DEVICE, backward, machine, on_device, without_waiting

SHAPES = [(200, 100), (100,), (40000,), (7,)]


def _pair() -> tuple[Any, Given]:
    return on_device(Given(SHAPES, [torch.float32])), Given(SHAPES, [torch.float32])


def _give(whole: nn.Module, parts: list[list[Any]], factor: float = 1.0) -> None:
    for param, rows in zip(whole.parameters(), zip(*parts, strict=True), strict=True):
        param.grad = mean_of([None if row is None else row * factor for row in rows])


@on_cuda_ranks(2, name=SCALED)
def test_scalers_skip_on_every_rank(rank: int, world: int, name: str) -> None:
    whose, how = name.split(", ")
    with machine():
        scaler, other = scaler_on(0, **OPTIONS), scaler_on(None, **OPTIONS)
        if whose == "torch":
            scaler = torch.amp.GradScaler("cpu", **OPTIONS)
            scaler._lazy_init_scale_growth_tracker(torch.device("cuda", 0))
        check_scaled(rank, world, how, (scaler, other), DEVICE)


@on_cuda_ranks(2, stage=(1, 2), how=("no_sync", "per micro-step"))
def test_accumulated_windows(rank: int, world: int, stage: Any, how: str) -> None:
    """Windows of three micro-steps: sent at the end of each, or only after the last one."""
    with machine() as ranks:
        model, whole = _pair()
        optimizer = zero.shard(
            model, faststep.optim.AdamW(model.parameters(), lr=0.01, max_grad_norm=1.0),
            stage=stage, bucket_mb=0.1,
        )  # fmt: skip
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        reference = faststep.optim.AdamW(whole.parameters(), lr=0.01, max_grad_norm=1.0)
        other = torch.optim.lr_scheduler.StepLR(reference, 1, gamma=0.5)
        wrong, sent = [], []
        for window in range(3):
            micro = [[grads_for(model, r, window, m) for r in range(world)] for m in range(3)]
            ranks.sent.clear()
            with without_waiting(window > 0):
                for number, parts in enumerate(micro):
                    loss = model(parts[rank])
                    quiet = how == "no_sync" and number < 2
                    with optimizer.no_sync() if quiet else contextlib.nullcontext():
                        backward(loss)
                optimizer.step()
            scheduler.step()
            sent.append(sum(size for name, size in ranks.sent if name == "reduce_scatter"))
            plain = [[[fake.plain(g) for g in part] for part in parts] for parts in micro]
            _give(whole, _sums(plain, how, world))
            reference.step()
            other.step()
            optimizer.zero_grad()
            wrong += [
                f"{window}, p{n}" for n in differences(model.parameters(), whole.parameters())
            ]
        wrong += states_differ(optimizer, reference)
        laid_out = sum(bucket.nbytes for bucket in optimizer._engine.buckets)
        assert not wrong, wrong
        assert sent == [laid_out * (3 if how == "per micro-step" else 1) / 2] * 3


@on_cuda_ranks(2)
def test_exchanged_parameters(rank: int, world: int) -> None:
    """All parameters, and then one of them, change places with another model's."""
    with machine():
        (model, whole), (other, other_whole) = _pair(), _pair()
        with torch.no_grad():
            for param in (*other.parameters(), *other_whole.parameters()):
                param.mul_(-2.0)
        optimizer = zero.shard(
            model, faststep.optim.AdamW(model.parameters(), lr=0.01), bucket_mb=0.1
        )
        reference = faststep.optim.AdamW(whole.parameters(), lr=0.01)
        wrong = []
        for step in range(5):
            for one, two in ((model, other), (whole, other_whole)):
                pairs = [*zip(one.parameters(), two.parameters(), strict=True)]
                for p, e in pairs[: {1: 4, 2: 1, 3: 4}.get(step, 0)]:
                    p.data, e.data = e.data, p.data
            parts = [grads_for(model, r, step) for r in range(world)]
            backward(model(parts[rank]))
            optimizer.step()
            _give(whole, [[fake.plain(g) for g in part] for part in parts])
            reference.step()
            optimizer.zero_grad()
            wrong += [f"{step}, p{n}" for n in differences(model.parameters(), whole.parameters())]
            pairs = zip(other.parameters(), other_whole.parameters(), strict=True)
            wrong += [f"{step}, e{n}" for n in differences(*zip(*pairs, strict=True))]
        wrong += states_differ(optimizer, reference)
        assert not wrong, wrong


def _sums(micro: list[Any], how: str, world: int) -> list[list[Tensor]]:
    """What is averaged over the ranks, as if the first rank had all of it."""
    if how == "per micro-step":
        rows = [[mean_of(rows) for rows in zip(*parts, strict=True)] for parts in micro]
        total = [a + b + c for a, b, c in zip(*rows, strict=True)]
        return [total]
    ranks = list(zip(*micro, strict=True))
    added = [[(a + b) + c for a, b, c in zip(*windows, strict=True)] for windows in ranks]
    return [[t / 3 for t in one] for one in added] if how == "accumulate" else added


@on_cuda_ranks(3, name=("AdamW", "momentum", "torch AdamW"))
def test_state_dicts(rank: int, world: int, name: str) -> None:
    """To an unsharded run and back, and on to another sharded one, all with the same gradients."""
    with machine():
        wrong: list[str] = []
        model, whole = (
            on_device(Given(ALL_SHAPES, [torch.float32])),
            Given(ALL_SHAPES, [torch.float32]),
        )
        optimizer = zero.shard(model, optimizer_of(name, model.parameters()), bucket_mb=0.1)
        reference = optimizer_of(name.removeprefix("torch "), whole.parameters())
        _alike(optimizer, model, reference, whole, world, 0)
        state = optimizer.state_dict()
        if rank == 0:
            theirs = reference.state_dict()
            for key, entries in theirs["state"].items():
                for what, value in entries.items():
                    if not torch.equal(torch.as_tensor(state["state"][key][what]).cpu(), value):
                        wrong.append(f"saved {what} of {key}")
            assert all(
                value.is_cpu for entries in state["state"].values() for value in entries.values()
            )
        shared = [state]
        dist.broadcast_object_list(shared, src=0)
        again = on_device(Given(ALL_SHAPES, [torch.float32]))
        with torch.no_grad():
            for param, value in zip(again.parameters(), whole.parameters(), strict=True):
                param.copy_(value)
        later = zero.shard(again, optimizer_of(name, again.parameters()), stage=1, bucket_mb=0.05)
        later.load_state_dict(copy.deepcopy(shared[0]))
        _alike(later, again, reference, whole, world, 2)
        wrong += [f"loaded p{n}" for n in differences(again.parameters(), whole.parameters())]
        wrong += states_differ(later, reference)
        assert not wrong, wrong


def _alike(sharded: Any, model: Any, reference: Any, whole: Any, world: int, first: int) -> None:
    for step in (first, first + 1):
        grads = grads_for(model, step)
        backward(model(grads))
        sharded.step()
        sharded.zero_grad()
        _give(whole, [[fake.plain(g) for g in grads]] * world)
        for param in whole.parameters():
            param.grad = torch.empty_like(param).copy_(param.grad)
        reference.step()


@on_cuda_ranks(2)
def test_a_gradient_dropped_on_one_rank(rank: int, world: int) -> None:
    """One rank sets a gradient to None by itself, and another order of hooks on each rank."""
    with machine():
        model, _ = _pair()
        optimizer = zero.shard(
            model, faststep.optim.AdamW(model.parameters(), lr=0.01, max_grad_norm=1.0),
            bucket_mb=0.1,
        )  # fmt: skip
        found: list[Any] = []
        for step in range(2):
            backward(model(grads_for(model, rank, step)))
            before = [fake.plain(p).clone() for p in model.parameters()]
            if step == 1 and rank == 0:
                next(model.parameters()).grad = None
            optimizer.step()
            optimizer.zero_grad()
            changed = [
                not torch.equal(fake.plain(p), b)
                for p, b in zip(model.parameters(), before, strict=True)
            ]
            found += [any(changed), optimizer.step_was_skipped]
        backward(model(grads_for(model, rank, 2)))
        with pytest.raises(RuntimeError, match="gradients of different parameters"):
            optimizer.step()
        assert found == [True, False, False, True]


class Forked(nn.Module):
    """Branches that backward reaches in the order in which forward used them, the last first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList([nn.Linear(40, 40) for _ in range(5)])

    def forward(self, data: Tensor, order: list[int]) -> Tensor:
        return sum((self.parts[n](data).square().sum() for n in order), start=torch.zeros(()))


@on_cuda_ranks(3)
def test_other_orders_of_hooks_on_each_rank(rank: int, world: int) -> None:
    with machine():
        model, whole = on_device(Forked()), Forked()
        optimizer = zero.shard(
            model, faststep.optim.SGD(model.parameters(), lr=0.001), bucket_mb=0.001
        )
        reference = faststep.optim.SGD(whole.parameters(), lr=0.001)
        wrong: list[str] = []
        for step in range(4):
            orders = [[0, 1, 2, 3, 4], [4, 2, 0, 1, 3], [3, 4, 1, 0, 2]][:world]
            data = [torch.randn(6, 40, generator=_seeded(r, step)) for r in range(world)]
            backward(model(fake.claim(data[rank]), orders[rank]))
            optimizer.step()
            optimizer.zero_grad()
            parts = []
            for r in range(world):
                whole.zero_grad()
                whole(data[r], orders[r]).backward()
                parts.append([p.grad for p in whole.parameters()])
            _give(whole, parts)
            reference.step()
            wrong += [f"{step}, p{n}" for n in differences(model.parameters(), whole.parameters())]
        assert not wrong, wrong


def _seeded(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed) % 2**31)


@on_cuda_ranks(2, stage=(1, 2))
def test_inside_ddp(rank: int, world: int, stage: Any) -> None:
    """A model inside DistributedDataParallel; the optimizer takes over through its hook."""
    with machine() as ranks:
        model, whole = _pair()
        wrapper = DistributedDataParallel(model)
        optimizer = zero.shard(
            wrapper, faststep.optim.AdamW(wrapper.parameters(), lr=0.01), stage=stage,
            bucket_mb=0.1, max_grad_norm=1.0,
        )  # fmt: skip
        reference = faststep.optim.AdamW(
            whole.parameters(), lr=0.01, max_grad_norm=optimizer.max_grad_norm
        )
        wrong: list[str] = []
        for step in range(4):
            parts = [grads_for(model, r, step) for r in range(world)]
            ranks.sent.clear()
            with without_waiting(step > 0):
                backward(wrapper(parts[rank]))
                optimizer.step()
            _give(whole, [[fake.plain(g) for g in part] for part in parts])
            reference.step()
            optimizer.zero_grad()
            reduced = sum(size for name, size in ranks.sent if name == "reduce_scatter")
            if reduced != sum(bucket.nbytes for bucket in optimizer._engine.buckets) / 2:
                wrong.append(f"{step}: {reduced} bytes reduced")
            wrong += [f"{step}, p{n}" for n in differences(model.parameters(), whole.parameters())]
        wrong += states_differ(optimizer, reference)
        assert not wrong, wrong


@on_cuda_ranks(2)
def test_masters(rank: int, world: int) -> None:
    with machine():
        shapes, low = SHAPES, [torch.bfloat16, torch.float32]
        model, whole = on_device(Given(shapes, low)), Given(shapes, low)
        optimizer = zero.shard(
            model, faststep.optim.AdamW(model.parameters(), lr=0.01), master_weights=True,
            bucket_mb=0.05, max_grad_norm=1.0,
        )  # fmt: skip
        # The same on the host, where one rank has all.
        reference = faststep.optim.AdamW(
            whole.parameters(), lr=0.01, max_grad_norm=1.0, master_weights=True
        )
        wrong: list[str] = []
        for step in range(4):
            parts = [grads_for(model, r, step) for r in range(world)]
            backward(model(parts[rank]))
            optimizer.step()
            optimizer.zero_grad()
            _give(whole, [[fake.plain(g) for g in part] for part in parts])
            reference.step()
            wrong += [f"{step}, p{n}" for n in differences(model.parameters(), whole.parameters())]
        state = optimizer.state_dict()["state"]
        if rank == 0 and state[0]["master_weights"].dtype != torch.float32:
            wrong.append("no masters")
        assert not wrong, wrong


@on_cuda_ranks(2)
def test_distributed_checkpoints(rank: int, world: int) -> None:
    """torch.distributed.checkpoint saves slices; a run on the host without sharding loads them."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with tempfile.TemporaryDirectory() as folder, machine():
        model, whole = _pair()
        optimizer = zero.shard(model, optimizer_of("AdamW", model.parameters()), bucket_mb=0.1)
        reference = optimizer_of("AdamW", whole.parameters())
        _alike(optimizer, model, reference, whole, world, 0)
        saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        shared = [folder]
        dist.broadcast_object_list(shared, src=0)
        dcp.save(saved, checkpoint_id=shared[0])
        found = {"optimizer": get_optimizer_state_dict(whole, reference)}
        wanted = {
            name: {key: value.clone() for key, value in state.items()}
            for name, state in found["optimizer"]["state"].items()
        }
        for state in found["optimizer"]["state"].values():
            for value in state.values():
                value.zero_()
        dcp.load(found, checkpoint_id=shared[0])
        dist.barrier()
        for name, state in found["optimizer"]["state"].items():
            for key, value in state.items():
                assert torch.equal(value, wanted[name][key]), f"{key} of {name}"


@on_cuda_ranks(2)
def test_what_is_refused(rank: int, world: int) -> None:
    def refuses(model: Any, text: str) -> None:
        with pytest.raises(TypeError, match=text):
            zero.shard(model, optimizer_of("AdamW", model.parameters()))

    with machine():
        model, _ = _pair()
        model.p1 = nn.Parameter(torch.ones(100))
        refuses(model, "cuda:0, and 'p1' on cpu: all must be in one memory")
        model.p1 = fake.parameter(torch.ones(100), 1)
        refuses(model, "cuda:0, and 'p1' on cuda:1: all must be in one memory")
        other = nn.Module()
        other.p0 = fake.parameter(torch.ones(100), 1)
        refuses(other, r"the current device is cuda:0: call torch\.cuda\.set_device")
        model, _ = _pair()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zero.transport.group, "backend_for", lambda group, kind: "gloo")
            refuses(model, "need a process group with NCCL, and this one has gloo for CUDA")
        optimizer = zero.shard(model, optimizer_of("AdamW", model.parameters()))
        text = r"Join does not support shard\(\) of parameters on a CUDA device"
        with pytest.raises(RuntimeError, match=text):
            optimizer.join_hook()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zero.transport.group, "is_capturing", lambda: True)
            with pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph"):
                optimizer.step()


def _engine_run_backward(call: Callable[[], bool]) -> bool:
    """As torch's function through which all backward passes go."""
    return call()


def test_passes_inside_of_others_in_threads_of_autograd() -> None:
    """There the outer pass, which another thread has begun, is not on the stack."""
    found: list[bool] = []
    done = threading.Event()

    def look() -> None:
        found.append(is_inside_backward())
        found.append(_engine_run_backward(is_inside_backward))
        found.append(_engine_run_backward(lambda: _engine_run_backward(is_inside_backward)))
        done.set()

    look()
    done.clear()
    _thread.start_new_thread(look, ())
    assert done.wait(300)
    assert found == [False, False, True, False, True, True]
