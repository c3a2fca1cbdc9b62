"""The AMP chain on a CUDA device: scaling, skipping, clipping, without a look at the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import faststep
from optim.common import same_bits

from . import fake
from .common import Pair, scaler_on, values

pytestmark = pytest.mark.usefixtures("machine")
SCALE = 1024.0


def grads_of(pair: Pair, step: int, bad: int | None = None) -> list[torch.Tensor]:
    """Scaled gradients; in step `bad` one of them is infinite."""
    grads = [values(tuple(p.shape), 9 * step + i, p.dtype) for i, p in enumerate(pair.cpu)]
    for grad in grads:
        grad.mul_(SCALE)
    if step == bad:
        grads[-1].view(-1)[-1] = float("inf")
    return grads


def twins(pair: Pair, make: Any, **kwargs: Any) -> Any:
    """(optimizer, scaler) on the CPU and on the device."""
    a, b = pair.optimizers(make, **kwargs)
    options = {"init_scale": SCALE, "growth_interval": 2}
    return (a, scaler_on(None, **options)), (b, scaler_on(pair.ordinals[0], **options))


def assert_same_scalers(a: Any, b: Any) -> None:
    assert same_bits(a._scale, fake.plain(b._scale))
    assert same_bits(a._growth_tracker, fake.plain(b._growth_tracker))


def test_unscale_on_several_devices() -> None:
    pair = Pair([values((50,), i, torch.float32) for i in range(3)], [0, 1, 0])
    both = twins(pair, faststep.optim.AdamW)
    pair.set_grads(grads_of(pair, 0))
    for optimizer, scaler in both:
        scaler.unscale_(optimizer)
    for p, q in zip(pair.cpu, pair.cuda, strict=True):
        assert same_bits(p.grad, fake.plain(q.grad))


@pytest.mark.parametrize("way", ["unscale_", "step"])
def test_float16_gradients_cannot_be_unscaled(way: str) -> None:
    pair = Pair([values((5,), 0, torch.float16)])
    optimizer, scaler = twins(pair, faststep.optim.AdamW)[1]
    pair.set_grads([torch.ones(5, dtype=torch.float16)])
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        getattr(scaler, way)(optimizer)
    assert torch.equal(fake.plain(pair.cuda[0].grad), torch.ones(5, dtype=torch.float16))


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_scale_with_bounds(machine: fake.Machine, hysteresis: int) -> None:
    options = {"init_scale": SCALE, "growth_interval": 2, "min_scale": 700.0, "max_scale": 3000.0}
    pair = Pair([values((5,), 0, torch.float32)])
    a, b = pair.optimizers(faststep.optim.SGD, lr=0.1)
    scalers = [scaler_on(d, **options, hysteresis=hysteresis) for d in (None, 0)]
    for step in range(8):
        pair.set_grads(grads_of(pair, step, bad=step if step in (0, 1, 5) else None))
        before = machine.calls("cuLaunchKernel")
        for optimizer, scaler in zip((a, b), scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert machine.calls("cuLaunchKernel") - before == 3
        assert_same_scalers(*scalers)


def test_kept_on_other_streams(machine: fake.Machine) -> None:
    pair = Pair([values((3000,), 0, torch.float32)])
    a, b = pair.optimizers(faststep.optim.AdamW, max_grad_norm=0.1)
    streams = [machine.stream() for _ in range(3)]
    machine.lag(100)
    for step in range(6):
        grad = values((3000,), step, torch.float32)
        machine.synchronize()  # of what torch does there the fake driver knows nothing
        pair.set_grads([grad])
        machine.use(streams[step % 3])
        a.step()
        b.step()
    machine.synchronize()
    pair.assert_same(a, b)


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("ordinals", [[0, 1], [0, None], [1, 1]])
def test_norm_on_several_devices(ordinals: list[int | None], max_norm: float | None) -> None:
    pair = Pair([values((50,), i, torch.float32) for i in range(2)], ordinals)
    both = twins(pair, faststep.optim.SGD, lr=0.1, max_grad_norm=max_norm)
    for step in range(2):
        pair.set_grads(grads_of(pair, step))
        for optimizer, scaler in both:
            scaler.step(optimizer)
            scaler.update()
        ours, theirs = (optimizer.last_grad_norm for optimizer, _ in both)
        torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("way", ["unscale_", "step"])
def test_float16_gradients_on_one_of_several_devices(way: str) -> None:
    pair = Pair([values((5,), 0, torch.float32), values((5,), 1, torch.float16)], [0, 1])
    optimizer, scaler = twins(pair, faststep.optim.AdamW)[1]
    pair.set_grads([torch.ones(5), torch.ones(5, dtype=torch.float16)])
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        getattr(scaler, way)(optimizer)
    for p in pair.cuda:
        assert torch.equal(fake.plain(p.grad), torch.ones(5, dtype=p.dtype))
