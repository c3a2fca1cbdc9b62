"""The AMP chain on a CUDA device: scaling, skipping, clipping, without a look at the device."""

from typing import Any

import pytest
import torch

import faststep
from gpu.common import Twins, values
from optim.common import same_bits

from . import fake
from .common import scaler_on

pytestmark = pytest.mark.usefixtures("machine")
SCALE = 1024.0


def grads_of(pair: Twins, step: int, bad: int | None = None) -> list[torch.Tensor]:
    """Scaled gradients; in step `bad` one of them is infinite."""
    grads = [values(tuple(p.shape), 9 * step + i, p.dtype) for i, p in enumerate(pair.cpu)]
    for grad in grads:
        grad.mul_(SCALE)
    if step == bad:
        grads[-1].view(-1)[-1] = float("inf")
    return grads


def twins(pair: Twins, make: Any, **kwargs: Any) -> Any:
    """(optimizer, scaler) on the CPU and on the device."""
    a, b = pair.optimizers(make, **kwargs)
    options = {"init_scale": SCALE, "growth_interval": 2}
    return (a, scaler_on(None, **options)), (b, scaler_on(pair.devices[0].index, **options))


def test_unscale_on_several_devices() -> None:
    pair = Twins(
        [values((50,), i, torch.float32) for i in range(3)], ["cuda:0", "cuda:1", "cuda:0"]
    )
    both = twins(pair, faststep.optim.AdamW)
    pair.set_grads(grads_of(pair, 0))
    for optimizer, scaler in both:
        scaler.unscale_(optimizer)
    for p, q in zip(pair.cpu, pair.cuda, strict=True):
        assert same_bits(p.grad, fake.plain(q.grad))


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:1", "cuda:0"]])
@pytest.mark.parametrize("way", ["unscale_", "step"])
def test_float16_gradients_cannot_be_unscaled(way: str, devices: list[str]) -> None:
    """Those of the last parameter, whose device may be another one."""
    dtypes = [torch.float32, torch.float16][-len(devices) :]
    pair = Twins([values((5,), i, dtype) for i, dtype in enumerate(dtypes)], devices)
    optimizer, scaler = twins(pair, faststep.optim.AdamW)[1]
    pair.set_grads([torch.ones(5, dtype=dtype) for dtype in dtypes])
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        getattr(scaler, way)(optimizer)
    for p in pair.cuda:
        assert torch.equal(fake.plain(p.grad), torch.ones(5, dtype=p.dtype))
