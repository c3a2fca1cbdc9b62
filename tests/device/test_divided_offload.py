"""Offload of DTensors on the fake device: the bits of DTensors in CPU memory without it.

fully_shard cannot run here, so gradients are set as it leaves them: see test_divided.py.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import faststep
from faststep._torch.optim import increment_version
from faststep.offloading import places
from gpu.common import values
from offload.common import assert_same, bits
from ranks import on_cuda_ranks

from . import fake, late
from .test_divided import cut
from .test_sharded_offload import offloading

SHAPES = [(300, 130), (7, 640), (256 * 40,), (70, 100, 2), (3, 5000), (1,), (6000, 2)]
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "clipped": {"max_grad_norm": 0.5},
    "int8": {"state_dtype": "int8", "max_grad_norm": 0.5},
    "halves": {"state_dtype": "int8", "master_weights": "remainder16", "max_grad_norm": 0.5},
    "scaled": {"max_grad_norm": 0.5},
    "noise": {"state_dtype": "bf16", "rounding": "stochastic"},
}


@contextlib.contextmanager
def machine() -> Iterator[late.Late]:
    with offloading() as ranks, pytest.MonkeyPatch.context() as patch:
        for name in ("device", "is_cuda", "is_cpu"):
            of_part = property(lambda tensor, name=name: getattr(tensor._local_tensor, name))
            patch.setattr(DTensor, name, of_part, raising=False)
        patch.setattr(places, "KINDS", tuple({*places.KINDS, fake.OnCuda}))
        yield ranks.late


class Twins:
    """Parts of parameters in CPU memory, and the same on the device, offloaded."""

    def __init__(self, device: late.Late, mesh: DeviceMesh, **options: Any) -> None:
        self.device, self.mesh = device, mesh
        self.dtype = torch.bfloat16 if "master_weights" in options else torch.float32
        drawn = [values(shape, n, self.dtype) for n, shape in enumerate(SHAPES)]
        self.cpu = [cut(value, mesh).requires_grad_() for value in drawn]
        self.cuda = [self.there(cut(value, mesh)).requires_grad_() for value in drawn]
        self.a, self.b = (
            faststep.optim.AdamW(some, lr=0.01, **options) for some in (self.cpu, self.cuda)
        )
        self.handle: Any = faststep.offload(self.b, threads=2)

    def there(self, value: Any) -> Any:
        part = value._local_tensor
        made = fake.allocated(part.shape, part.dtype)
        fake.plain(made).copy_(part)
        return DTensor(made, value._spec, requires_grad=False)

    def scalar(self, optimizer: Any, value: float) -> Tensor:
        made = torch.tensor(value)
        return fake.claim(made) if optimizer is self.b else made

    def backward(self, seed: int) -> None:
        for n, (mine, its) in enumerate(zip(self.cuda, self.cpu, strict=True)):
            its.grad = cut(values(tuple(its.shape), 100 * seed + n, self.dtype), self.mesh)
            mine.grad = self.there(its.grad)
            for hook in (mine._post_accumulate_grad_hooks or {}).values():
                hook(mine)

    def check(self) -> None:
        found = [fake.plain(one._local_tensor).clone() for one in self.cuda]
        assert_same(bits(found), bits([one._local_tensor.detach() for one in self.cpu]))
        assert_same(bits(self.b.last_grad_norm), bits(self.a.last_grad_norm))
        assert_same(*(bits(list(one.state.values())) for one in (self.b, self.a)))


def train(device: late.Late, rank: int, world: int, kind: str) -> None:
    twins = Twins(device, init_device_mesh("cpu", (world,)), **KINDS[kind])
    for seed in range(4):
        twins.backward(seed)
        for optimizer, params in ((twins.a, twins.cpu), (twins.b, twins.cuda)):
            if seed == 1:  # what a script writes
                fake.plain(params[0]._local_tensor).mul_(0.5)
                increment_version(params[:1])
            if kind == "scaled":
                optimizer.grad_scale = twins.scalar(optimizer, 4.0)
                optimizer.found_inf = twins.scalar(optimizer, float(seed == 2 and rank == 1))
            optimizer.step()
        twins.check()
        if seed == 2 and kind != "scaled":
            twins.b.load_state_dict(twins.b.state_dict(native=True))
    assert all(value.is_cpu for state in twins.b.state.values() for value in state.values())


@on_cuda_ranks(2, kind=KINDS)
def test_bits(rank: int, world: int, kind: str) -> None:
    with machine() as device:
        train(device, rank, world, kind)
