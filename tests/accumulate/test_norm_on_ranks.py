"""norm_in_backward=model under DistributedDataParallel, with gloo over loopback."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import faststep

from .common import OddLayouts, assert_equal
from .processes import Collectives, Job

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
SMALL = 0.01  # MiB: several buckets


def _inputs(rank: int, count: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(7 + rank)
    return [torch.randn(3, 30, generator=source) * 3.0 for _ in range(count)]


def _tokens(case: dict[str, Any], rank: int, number: int) -> int:
    return 3 + number if case["tokens"] == "alike" else 3 + number + rank


def _train(rank: int, case: dict[str, Any], hooked: bool) -> dict[str, Any]:
    """Nine backward passes; every third only adds up, or completes a window."""
    net = OddLayouts(case.get("dtype", torch.float32))
    views = case.get("views", False)
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL, gradient_as_bucket_view=views)
    wanted = model if hooked else False
    optimizer = faststep.optim.AdamW(
        net.parameters(), lr=0.01, eps=1e-3, max_grad_norm=0.3, norm_in_backward=wanted
    )
    accum = scaler = None
    if "normalize" in case:
        sums = torch.float32 if case.get("dtype") else None
        accum = faststep.accumulate(
            optimizer, 3, model=model, normalize=case["normalize"], dtype=sums
        )
    if "scale" in case:
        scaler = faststep.amp.GradScaler("cpu", init_scale=case["scale"], growth_interval=100)
    norms = []
    inputs = _inputs(rank, case.get("steps", 9))
    for number, x in enumerate(inputs):
        if accum is not None:
            with accum:
                if case["normalize"] == "tokens":
                    accum.add_count(_tokens(case, rank, number))
                accum.backward(model(x))
            if number == len(inputs) - 1 and not accum.ready:
                assert accum.flush()
            if not accum.ready:
                continue
        elif number % 3 == 1:
            with model.no_sync():
                model(x).backward()
            continue
        elif scaler is not None:
            scaler.scale(model(x)).backward()
        else:
            model(x).backward()
        if case.get("changed"):
            net.turned.grad.mul_(3.0)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        norms.append(optimizer.last_grad_norm)
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    values = [p.detach().clone() for p in net.parameters()]
    return {"values": values + norms, "fallbacks": optimizer.norm_fallbacks}


CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "every step": ({}, {}),
    "buckets": ({"views": True}, {}),
    "scaler": ({"scale": 8.0}, {"scale": 1}),
    "mean": ({"normalize": "mean"}, {}),
    "mean, buckets": ({"normalize": "mean", "views": True}, {}),
    "short window": ({"normalize": "mean", "steps": 8}, {}),
    "fp32 sums": ({"normalize": "mean", "dtype": torch.bfloat16}, {}),
    "fp32 sums, tokens": (
        {"normalize": "tokens", "tokens": "other", "dtype": torch.bfloat16},
        {},
    ),
    "as many tokens": ({"normalize": "tokens", "tokens": "alike"}, {}),
    "other tokens": ({"normalize": "tokens", "tokens": "other"}, {"scale": 3}),
    "changed": ({"changed": True}, {"changed": 6}),
    "changed, buckets": ({"changed": True, "views": True}, {"changed": 6}),
}


def _norms(rank: int, world: int, case: dict[str, Any]) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_train(rank, case, hooked) for hooked in (True, False)]


def _refusals(rank: int, world: int) -> dict[str, Any]:
    net = OddLayouts(torch.float32)
    unused = DistributedDataParallel(net, find_unused_parameters=True)
    static = DistributedDataParallel(net, static_graph=True)
    counted = DistributedDataParallel(net)
    Collectives(counted).stop()
    errors = []
    for model in (unused, static, counted, net):
        try:
            faststep.optim.SGD(net.parameters(), norm_in_backward=model)
        except TypeError as error:
            errors.append(str(error))
    optimizer = faststep.optim.SGD(net.parameters(), max_grad_norm=1e-3, norm_in_backward=True)
    model = DistributedDataParallel(net)
    model(_inputs(rank, 1)[0]).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return {
        "errors": errors,
        "warning": str(caught[0].message),
        "fallbacks": optimizer.norm_fallbacks,
    }


def _life(rank: int, world: int) -> dict[str, Any]:
    """Two optimizers of one model; then one lets go, a copy is made, and a release takes over."""
    net = OddLayouts(torch.float32)
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL)
    large, *rest = net.parameters()
    first = faststep.optim.SGD([large], lr=0.01, max_grad_norm=0.1, norm_in_backward=model)
    second = faststep.optim.SGD(rest, lr=0.01, max_grad_norm=0.1)
    second.norm_in_backward = model
    for x in _inputs(rank, 3):
        model(x).backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    found: dict[str, Any] = {"fallbacks": [first.norm_fallbacks, second.norm_fallbacks]}
    found["copy"] = copy.deepcopy(first).norm_in_backward
    dead = weakref.ref(first._backward_norm)
    first.norm_in_backward = False
    gc.collect()
    found["gone"] = dead() is None
    first.max_grad_norm = None
    release = faststep.release_gradients(model, first)
    model(_inputs(rank, 1)[0]).backward()
    found["freed"] = [param.grad is None for param in net.parameters()]
    first.step()
    second.step()
    release.remove()
    found["values"] = [param.detach().clone() for param in net.parameters()]
    found["later"] = second.norm_fallbacks
    return found


JOBS = [
    *(Job(f"norm, {name}", 2, _norms, (case,)) for name, (case, _) in CASES.items()),
    Job("norm, refusals", 2, _refusals),
    Job("norm, life", 2, _life),
]
Ranks = Callable[[str], list[Any]]


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_the_two_pass_step(name: str, ranks: Ranks) -> None:
    results = ranks(f"norm, {name}")
    for measured, plain in results:
        assert_equal(measured["values"], plain["values"])
        assert_equal(measured["values"], results[0][0]["values"])
        assert measured["fallbacks"] == CASES[name][1]


def test_what_is_refused(ranks: Ranks) -> None:
    for result in ranks("norm, refusals"):
        unused, static, hooked, plain = result["errors"]
        assert "norm_in_backward does not support" in unused
        assert "find_unused_parameters=True" in unused
        assert "static_graph=True" in static
        assert "has one already" in hooked
        assert "not OddLayouts" in plain
        assert "give norm_in_backward the DistributedDataParallel model" in result["warning"]
        assert result["fallbacks"] == {"distributed": 1}


def test_several_optimizers_and_their_end(ranks: Ranks) -> None:
    results = ranks("norm, life")
    for result in results:
        assert result["fallbacks"] == [{}, {}]
        assert result["copy"] is True
        assert result["gone"]
        assert result["freed"] == [True, False, False, False]
        assert result["later"] == {}
        assert_equal(result["values"], results[0]["values"])
