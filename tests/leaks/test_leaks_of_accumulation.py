"""Windows, installed hooks and their removal keep no memory and no references."""

from typing import Any

import pytest
import torch
from torch import nn

import faststep

from .test_leaks import assert_no_growth

KINDS: dict[str, dict[str, Any]] = {
    "mean": {},
    "tokens": {"normalize": "tokens"},
    "fp32 sums": {"dtype": torch.float32},
    "in pairs": {"dtype": torch.float32, "in_pairs": True},
}


def make(kwargs: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    dtype = torch.bfloat16 if "dtype" in kwargs else torch.float32
    model = nn.Linear(3, 3, dtype=dtype)
    return model, faststep.optim.SGD(model.parameters(), lr=1e-6), torch.ones(1, 3, dtype=dtype)


@pytest.mark.parametrize("kwargs", KINDS.values(), ids=KINDS)
def test_windows(kwargs: dict[str, Any]) -> None:
    model, optimizer, x = make(kwargs)
    accum = faststep.accumulate(optimizer, 2, model=model, **kwargs)

    def window() -> None:
        for _ in range(2):
            with accum:
                if kwargs.get("normalize") == "tokens":
                    accum.add_count(1)
                accum.backward(model(x).sum())
        accum.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()

    assert_no_growth(window)


@pytest.mark.parametrize("kwargs", KINDS.values(), ids=KINDS)
def test_installing_and_removing(kwargs: dict[str, Any]) -> None:
    model, optimizer, x = make(kwargs)
    scaler = faststep.amp.GradScaler("cpu", init_scale=4.0)

    def live() -> None:
        accum = faststep.accumulate(optimizer, 2, model=model, **kwargs)
        accum.install(scaler=scaler)
        for _ in range(3):
            if kwargs.get("normalize") == "tokens":
                accum.add_count(1)
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update(4.0)
            optimizer.zero_grad()
        accum.remove()

    assert_no_growth(live)


@pytest.mark.parametrize("kwargs", KINDS.values(), ids=KINDS)
def test_saving_and_loading(kwargs: dict[str, Any]) -> None:
    model, optimizer, x = make(kwargs)
    accum = faststep.accumulate(optimizer, 2, model=model, **kwargs)
    with accum:
        if kwargs.get("normalize") == "tokens":
            accum.add_count(1)
        accum.backward(model(x).sum())
    assert_no_growth(lambda: accum.load_state_dict(accum.state_dict()))


RELEASES: dict[str, tuple[float | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "per parameter": (0.5, {"clip": "per_parameter"}),
    "lagged": (0.5, {"clip": "lagged"}),
}


@pytest.mark.parametrize(("limit", "kwargs"), RELEASES.values(), ids=RELEASES)
def test_release(limit: float | None, kwargs: dict[str, Any]) -> None:
    model, _, x = make({})
    optimizer = faststep.optim.AdamW(model.parameters(), lr=1e-6, max_grad_norm=limit)
    kept = faststep.release_gradients(model, optimizer, **kwargs)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    assert_no_growth(step)
    kept.remove()

    def live() -> None:
        release = faststep.release_gradients(model, optimizer, **kwargs)
        step()
        release.remove()

    assert_no_growth(live)


def test_release_of_tied_embeddings() -> None:
    token, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = token.weight
    model = nn.Sequential(token, head)
    optimizer = faststep.optim.AdamW(model.parameters(), lr=1e-6)

    def live() -> None:
        release = faststep.release_gradients(model, optimizer)
        model(torch.tensor([1, 3, 1])).sum().backward()
        optimizer.step()
        release.remove()

    assert_no_growth(live)
