"""What frameworks ask before they unscale and clip: the answers of torch's default classes."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import faststep
from faststep.optim import SGD, Adam, AdamW, Lion

NAMED = (Adam, AdamW, SGD)
CLASSES = (*NAMED, Lion)
SCALERS = (torch.amp.GradScaler, faststep.amp.GradScaler)
LIMIT = 0.5

over_scalers = pytest.mark.parametrize("scaler_class", SCALERS, ids=["torch's", "faststep's"])


def handles_unscaling(optimizer: Any) -> bool:
    """Lightning's question, in lightning/fabric/plugins/precision/amp.py."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def params() -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=source)) for shape in ((7,), (3, 4))]


def set_gradients(tensors: list[Tensor], seed: int, scale: float, bad: bool = False) -> None:
    source = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.grad = scale * torch.randn(tensor.shape, generator=source)
    if bad:
        tensors[0].grad[0] = torch.inf


def lightning_step(scaler: Any, optimizer: Any, clip: float | None) -> None:
    """MixedPrecision.optimizer_step and clip_gradients of Lightning 2.6, call by call."""
    if not handles_unscaling(optimizer):
        scaler.unscale_(optimizer)
    if clip is not None:
        if handles_unscaling(optimizer):
            raise RuntimeError("does not allow for gradient clipping")
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(tensors, clip)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("cls", NAMED)
@pytest.mark.parametrize("fused", [None, False, True])
def test_the_answer_is_that_of_torchs_class(cls: Any, fused: bool | None) -> None:
    theirs = getattr(torch.optim, cls.__name__)(params(), fused=fused)
    ours = cls(params(), fused=fused)
    assert handles_unscaling(ours) is handles_unscaling(theirs) is bool(fused)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert handles_unscaling(twin) is bool(fused)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_step_that_clips_unscales_too(cls: Any) -> None:
    """It must: a framework would else unscale what was measured, or is divided, in the step."""
    assert not handles_unscaling(cls(params()))
    assert handles_unscaling(cls(params(), max_grad_norm=1.0))
    optimizer = cls(params())
    optimizer.max_grad_norm = 1.0
    assert handles_unscaling(optimizer)
    optimizer.max_grad_norm = None
    assert not handles_unscaling(optimizer)
    optimizer.grad_scale = torch.tensor(2.0)
    assert handles_unscaling(optimizer)


@over_scalers
@pytest.mark.parametrize("clip", [None, LIMIT], ids=["whole", "clipped"])
@pytest.mark.parametrize("cls", NAMED)
def test_lightnings_calls(cls: Any, clip: float | None, scaler_class: Any) -> None:
    """Mixed precision with gradient_clip_val, and an overflow on the way."""
    results = []
    for made in (getattr(torch.optim, cls.__name__), cls):
        tensors = params()
        optimizer = made(tensors, lr=0.1)
        scaler = scaler_class("cpu", init_scale=64.0)
        for step in range(5):
            scaler.scale(torch.zeros(()))
            set_gradients(tensors, step, scaler.get_scale(), bad=step == 2)
            lightning_step(scaler, optimizer, clip)
        results.append((tensors, scaler.get_scale()))
    (theirs, their_scale), (ours, scale) = results
    assert scale == their_scale == 32.0
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
