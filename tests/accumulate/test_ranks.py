"""Accumulation under DistributedDataParallel with gloo, on 2 to 4 ranks over loopback."""

import contextlib
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import faststep
from ranks import assert_alike, on_cases, on_ranks

from .collectives import Collectives
from .common import (
    assert_close,
    assert_equal,
    batches,
    grads,
    joined,
    loss_of,
    make_model,
    micro_steps,
    values,
)


def _windows(rank: int, case: dict[str, Any]) -> tuple[Any, ...]:
    """What was sent in each micro-step, and gradients and parameters of each window."""
    low = torch.bfloat16 if case["dtype"] else torch.float32
    net = make_model(low)
    model = DistributedDataParallel(net, gradient_as_bucket_view=case.get("views", False))
    optimizer = faststep.optim.SGD(net.parameters(), lr=0.1)
    in_pairs = case.get("in_pairs", False)
    accum = faststep.accumulate(
        optimizer,
        3,
        model=model,
        normalize=case["normalize"],
        dtype=case["dtype"],
        in_pairs=in_pairs,
    )
    collectives, seen = Collectives(model), []
    sums, history = [], []
    for window in range(2):
        sizes = case["sizes"][rank] if window else [4, 4, 4]
        for batch in batches(sizes, 10 * window + rank, low):
            with accum:
                if case["normalize"] == "tokens":
                    accum.add_count(len(batch[1]))
                    accum.backward(loss_of(model, batch, "sum"))
                else:
                    accum.backward(loss_of(model, batch))
            seen.append(collectives.taken())
        if len(sizes) < 3:
            accum.flush()
        assert accum.ready
        seen.append(collectives.taken())
        accum.normalize_()
        sums.append(grads(net))
        optimizer.step()
        optimizer.zero_grad()
        history.append(values(net))
    collectives.stop()
    assert accum.windows == 2
    return seen, sums, history


def _expected(world: int, case: dict[str, Any], window: int, start: list) -> list[torch.Tensor]:
    """The gradient of one process that has all the data."""
    low = torch.bfloat16 if case["dtype"] else torch.float32
    net = make_model(low)
    with torch.no_grad():
        for param, value in zip(net.parameters(), start, strict=True):
            param.copy_(value)
    net.float()
    parts = []
    for rank in range(world):
        sizes = case["sizes"][rank] if window else [4, 4, 4]
        parts += batches(sizes, 10 * window + rank)
    if case["normalize"] == "tokens":
        loss_of(net, joined(parts)).backward()
    else:
        for part in parts:
            (loss_of(net, part) / (len(parts) if case["normalize"] == "mean" else world)).backward()
    return grads(net)


CASES = {
    "mean": {"normalize": "mean", "dtype": None, "sizes": [[4, 4, 4]] * 4},
    "views": {"normalize": "mean", "dtype": None, "sizes": [[4, 4, 4]] * 2, "views": True},
    "sum": {"normalize": "sum", "dtype": None, "sizes": [[4, 4, 4]] * 4},
    "tokens": {"normalize": "tokens", "dtype": None, "sizes": [[1, 2, 9], [7, 7, 1], [3] * 3]},
    "fp32 sums": {"normalize": "tokens", "dtype": torch.float32, "sizes": [[1, 2, 9], [7, 7, 1]]},
    "in pairs": {
        "normalize": "tokens",
        "dtype": torch.float32,
        "sizes": [[1, 2, 9], [7, 7, 1]],
        "in_pairs": True,
        "views": True,
    },
    "short": {"normalize": "mean", "dtype": None, "sizes": [[4, 4], [4, 4]]},
    "short and uneven": {"normalize": "tokens", "dtype": None, "sizes": [[5, 4], [2]]},
    "short fp32 sums": {"normalize": "mean", "dtype": torch.float32, "sizes": [[4], [4, 4]]},
    "short in pairs": {
        "normalize": "mean",
        "dtype": torch.float32,
        "sizes": [[4], [4, 4]],
        "in_pairs": True,
    },
    "one rank has none": {"normalize": "tokens", "dtype": None, "sizes": [[5, 4], []]},
}


@on_cases([*((2, name) for name in CASES), (3, "tokens"), (4, "mean")])
def test_windows(rank: int, world: int, name: str) -> None:
    case = CASES[name]
    seen, *found = _windows(rank, case)
    tolerance = 2e-6 if case["dtype"] is None else 0.02
    start = values(make_model())
    for window, (sums, params) in enumerate(zip(*found, strict=True)):
        expected = _expected(world, case, window, start)
        assert_close([grad.float() for grad in sums], expected, tolerance)
        assert_alike(params)
        start = params
    _check_collectives(case, seen, [3, len(case["sizes"][rank])])
    if case.get("in_pairs"):
        _, *without = _windows(rank, {**case, "in_pairs": False, "views": False})
        for ours, theirs in zip(found, without, strict=True):
            for window in range(2):
                assert_equal(ours[window], theirs[window])


def _check_collectives(case: dict, seen: list[tuple[int, int]], micro_steps: list[int]) -> None:
    """Nothing before the last micro-step of a window; then by the reducer, or in few buckets."""
    at = 0
    for count in micro_steps:
        steps, flush = seen[at : at + count], seen[at + count]
        at += count + 1
        last = steps.pop() if count == 3 else flush
        if count < 3:
            assert flush[1] == 2  # counts, and one bucket
        assert steps == [(0, 0)] * len(steps)
        if case["dtype"] is not None or count < 3:
            assert last == (0, 2)
        else:
            assert last == (1, int(case["normalize"] == "tokens"))
    assert at == len(seen)


class SomeUnused(nn.Module):
    """Three parameters of which the last is never used, the second only if asked."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name in ("always", "once", "never"):
            self.register_parameter(name, nn.Parameter(torch.ones(2, dtype=dtype)))

    def forward(self, factor: float, once: bool) -> torch.Tensor:
        total = self.always.sum() * factor
        return total + self.once.sum() if once else total


@on_ranks(2)
def test_unused_parameters(rank: int, world: int) -> None:
    """One parameter is used on rank 0 alone, in the first micro-step alone."""
    for dtype, in_pairs in ((None, False), (torch.float32, False), (torch.float32, True)):
        net = SomeUnused(torch.float32 if dtype is None else torch.bfloat16)
        model = DistributedDataParallel(net, find_unused_parameters=True)
        optimizer = faststep.optim.SGD(net.parameters(), lr=1.0)
        accum = faststep.accumulate(optimizer, 2, model=model, dtype=dtype, in_pairs=in_pairs)
        for index in range(2):
            with accum:
                accum.backward(model(rank + 1.0, rank == 0 and index == 0))
        accum.normalize_()
        assert net.always.grad.tolist() == [1.5, 1.5]
        assert net.once.grad.tolist() == [0.25, 0.25]
        assert net.never.grad is None


@on_ranks(2)
def test_gradients_that_were_left_are_no_part_of_a_window(rank: int, world: int) -> None:
    """Rank 1 has no micro-step in the short window, and has not cleared the gradients before it."""
    for dtype in (None, torch.float32):
        low = torch.float32 if dtype is None else torch.bfloat16
        net = make_model(low)
        model = DistributedDataParallel(net)
        optimizer = faststep.optim.SGD(net.parameters(), lr=0.0)
        accum = faststep.accumulate(optimizer, 2, model=model, dtype=dtype)
        *window, last = batches([4, 4, 4], rank, low)
        micro_steps(accum, model, window)
        optimizer.step()
        if rank == 0:
            optimizer.zero_grad()
            with accum:
                accum.backward(loss_of(model, last))
        assert accum.flush()
        accum.normalize_()
        net = make_model(low)
        loss_of(net, batches([4, 4, 4], 0, low)[2]).backward()
        assert_close(grads(model.module), grads(net), 1e-6)


@on_ranks(2)
def test_overflow_on_one_rank(rank: int, world: int) -> None:
    """An overflow on rank 1 alone drops the window on both."""
    net = make_model()
    model = DistributedDataParallel(net)
    optimizer = faststep.optim.AdamW(net.parameters())
    scaler = faststep.amp.GradScaler("cpu", init_scale=64.0)
    accum = faststep.accumulate(optimizer, 2, model=model)
    for window in range(3):
        for batch in batches([4, 4], rank):
            with accum:
                factor = float("inf") if (rank, window) == (1, 1) else 1.0
                scaler.scale(loss_of(model, batch) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    accum.flush()
    assert (accum.discarded, scaler.get_scale()) == (1, 32.0)
    assert_alike(values(net))


@on_ranks(2)
def test_installed(rank: int, world: int) -> None:
    net = make_model()
    model = DistributedDataParallel(net)
    optimizer = faststep.optim.SGD(net.parameters(), lr=0.1)
    accum = faststep.accumulate(optimizer, 2, model=model).install()
    collectives, seen = Collectives(model), []
    for batch in batches([4] * 5, rank):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(collectives.taken())
    assert accum.flush()
    seen.append(collectives.taken())
    accum.remove()
    assert model.require_backward_grad_sync
    collectives.stop()
    assert seen == [(0, 0), (1, 0), (0, 0), (1, 0), (0, 0), (0, 2)]
    found = values(net)
    assert_alike(found)
    net = make_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parts = [batches([4] * 5, rank) for rank in range(2)]
    for window in ((0, 1), (2, 3), (4,)):
        for index in window:
            for part in parts:
                (loss_of(net, part[index]) / (2 * len(window))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(found, values(net), 1e-5)


@on_ranks(2, installed=(False, True))
def test_resuming_inside_a_window(rank: int, world: int, installed: bool) -> None:
    """Interrupted before the end of a window, each rank with its own sums."""
    low, sums = (torch.float32, None) if installed else (torch.bfloat16, torch.float32)

    def start(seed: int) -> Any:
        net = make_model(low, seed)
        model = DistributedDataParallel(net)
        optimizer = faststep.optim.AdamW(net.parameters())
        accum = faststep.accumulate(optimizer, 3, model=model, dtype=sums)
        return net, model, optimizer, accum.install() if installed else accum

    results = []
    for interrupted in (False, True):
        net, model, optimizer, accum = start(0)
        for index, batch in enumerate(batches([4] * 3, rank, low)):
            if interrupted and index == 2:
                saved = pickle.dumps((net.state_dict(), accum.state_dict()))
                accum.remove()
                net, model, optimizer, accum = start(9)
                weights, state = pickle.loads(saved)
                net.load_state_dict(weights)
                accum.load_state_dict(state)
            with contextlib.nullcontext() if installed else accum:
                accum.backward(loss_of(model, batch))
            if installed or accum.ready:
                optimizer.step()
        results.append(values(net))
    assert_equal(*results)


@on_ranks(2)
def test_compiled(rank: int, world: int) -> None:
    """torch.compile around DistributedDataParallel against the plain one."""
    found = []
    for compiled in (False, True):
        net = make_model()
        model = DistributedDataParallel(net)
        if compiled:
            model = torch.compile(model, backend="eager")
        optimizer = faststep.optim.SGD(net.parameters(), lr=0.1)
        accum = faststep.accumulate(optimizer, 3, model=model)
        for _ in range(3):
            micro_steps(accum, model, batches([4] * 3, rank))
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(net))
        assert_alike(found[-1])
    assert_close(*found, 1e-6)


@on_ranks(2)
def test_errors(rank: int, world: int) -> None:
    optimizer = faststep.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="needs model="):
        faststep.accumulate(optimizer, 2, normalize="tokens")
    model = DistributedDataParallel(make_model(), static_graph=True)
    with pytest.raises(TypeError, match="static_graph=True"):
        faststep.accumulate(optimizer, 2, model=model)
    with pytest.raises(TypeError, match="does not support DistributedDataParallel"):
        faststep.release_gradients(model, optimizer)
    net = make_model()
    inside = faststep.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net)
    with pytest.raises(TypeError, match=r"DistributedDataParallel models \(its submodule '0'\)"):
        faststep.accumulate(inside, 2, model=nn.Sequential(model))
    for wrong in ({"model": net}, {"dtype": torch.float32}):
        accum = faststep.accumulate(inside, 2, **wrong)
        with (
            pytest.raises(TypeError, match="pass model= the DistributedDataParallel itself"),
            accum,
        ):
            pass
        accum.remove()
    for wrong in ({"model": net}, {}):
        accum = faststep.accumulate(inside, 2, **wrong).install()
        loss_of(model, batches([4], rank)[0]).backward()
        with pytest.raises(TypeError, match="pass model= the DistributedDataParallel itself"):
            inside.step()
        accum.remove()


@on_ranks(2)
def test_unused_in_the_last_micro_step(rank: int, world: int) -> None:
    """Gradients of the first micro-step alone, which the model does not look for in the last."""
    net = SomeUnused(torch.float32)
    net.never.requires_grad_(False)
    model = DistributedDataParallel(net)
    optimizer = faststep.optim.SGD([net.always, net.once], lr=1.0)
    accum = faststep.accumulate(optimizer, 2, model=model)
    with accum:
        accum.backward(model(rank + 1.0, True))
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"), accum:
        accum.backward(model(rank + 1.0, False))
    assert not accum.ready
