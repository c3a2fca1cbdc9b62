"""Gradients of FSDP2 and tensor parallelism: a norm of one rank's part would be wrong."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.nn import Parameter

import faststep
import faststep.optim
from faststep.amp import GradScaler

MODULES = pytest.mark.parametrize("module", [faststep, torch.nn.utils], ids=["ours", "torch's"])


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def param(mesh: Any) -> Parameter:
    made = Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    made.grad = distribute_tensor(torch.full((4, 4), 2.0), mesh, [Shard(0)])
    return made


def gradient(param: Parameter) -> Tensor:
    grad: Any = param.grad
    assert type(grad) is DTensor
    whole: Tensor = grad.full_tensor()
    return whole


@MODULES
def test_clipping_by_the_norm(module: Any, param: Parameter) -> None:
    norm = module.clip_grad_norm_([param], 1.0)
    assert type(norm) is DTensor
    torch.testing.assert_close(norm.full_tensor(), torch.tensor(8.0))
    torch.testing.assert_close(gradient(param), torch.full((4, 4), 0.25))


@MODULES
def test_clipping_in_two_calls_and_by_value(module: Any, param: Parameter) -> None:
    norm = module.get_total_norm([param.grad])
    assert type(norm) is DTensor
    module.clip_grads_with_norm_([param], 1.0, norm)
    torch.testing.assert_close(gradient(param), torch.full((4, 4), 0.25))
    module.clip_grad_value_([param], 0.125)
    torch.testing.assert_close(gradient(param), torch.full((4, 4), 0.125))


@pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("bad", [False, True])
def test_unscaling(cls: type[torch.amp.GradScaler], bad: bool, param: Parameter) -> None:
    optimizer, scaler = torch.optim.SGD([param], lr=0.5), cls("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    if bad:
        param.grad *= torch.inf
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (1.0 if bad else 2.0)
    whole: Any = param.detach()
    torch.testing.assert_close(whole.full_tensor(), torch.full((4, 4), 1.0 if bad else 0.5))


def test_our_optimizers_take_them(param: Parameter) -> None:
    faststep.optim.SGD([param], lr=0.5).step()
    whole: Any = param.detach()
    torch.testing.assert_close(whole.full_tensor(), torch.zeros(4, 4))
