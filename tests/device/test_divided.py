"""Steps of DTensors with states in few bits on the fake device: the bits of whole parameters.

`fully_shard` (FSDP2, stage 3) leaves such tensors to an optimizer. It cannot run here itself, as it
moves them on torch's own streams. A DTensor asks C++ where its part lies, which does not hear the
claim of the part, so Python's answer is replaced.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import faststep
from gpu.common import values
from optim.common import same_bits
from ranks import on_cuda_ranks

from . import fake

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
SHAPES = [(130, 70), (7, 640), (256 * 40,), (70, 100, 2), (1, 5000), (2, 64, 64), (6000, 2)]
KINDS: dict[str, dict[str, Any]] = {
    "int8": {"state_dtype": "int8"},
    "int8 beside fp32": {"state_dtype": {"exp_avg": "int8", "exp_avg_sq": "fp32"}},
    "int8, remainders": {"state_dtype": "int8", "master_weights": "remainder16"},
}
# The states of masters are made by a DTensor's operators, whose results claim nothing.
CASES = [
    (kind, device)
    for kind, options in KINDS.items()
    for device in ("cpu", "cuda")
    if device == "cpu" or "master_weights" not in options
]


@contextlib.contextmanager
def machine() -> Iterator[fake.Machine]:
    with pytest.MonkeyPatch.context() as patch:
        started = fake.start(patch)
        for name in ("device", "is_cuda", "is_cpu"):
            of_part = property(lambda tensor, name=name: getattr(tensor._local_tensor, name))
            patch.setattr(DTensor, name, of_part, raising=False)
        yield started
        started.synchronize()
        assert started.complaint() is None


def part_of(value: Any) -> Tensor:
    return fake.plain(value._local_tensor if isinstance(value, DTensor) else value)


def cut(value: Tensor, mesh: DeviceMesh) -> Any:
    """This rank's rows of a tensor that all ranks have."""
    first, end = (
        min(-(-value.shape[0] // mesh.size()) * rank, value.shape[0])
        for rank in (mesh.get_rank(), mesh.get_rank() + 1)
    )
    shape, stride = value.shape, value.stride()
    rows = value[first:end].clone()
    return DTensor.from_local(rows, mesh, [Shard(0)], shape=shape, stride=stride)


def claimed(value: Any) -> Any:
    return DTensor(fake.claim(value._local_tensor), value._spec, requires_grad=False)


# Rows of at least 64 elements, or parts of all ranks that begin with a block.
CODED = {
    2: [True, True, True, True, True, True, False],
    3: [True, True, False, True, True, True, False],
}


@on_cuda_ranks(2, 3, case=CASES)
def test_parts_have_the_bits_of_the_whole(rank: int, world: int, case: tuple[str, str]) -> None:
    """Also where each rank goes on with the state dict of its own."""
    kind, device = case
    options = {"lr": 0.01, "betas": (0.9, 0.95), **KINDS[kind]}
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    given: Any = claimed if device == "cuda" else Tensor.detach
    with machine() as started:
        mesh = init_device_mesh("cpu", (world,))
        drawn = [values(shape, n, dtype) for n, shape in enumerate(SHAPES)]
        whole = [nn.Parameter(value.clone()) for value in drawn]
        parts = [given(cut(value, mesh)).requires_grad_() for value in drawn]
        reference = faststep.optim.AdamW(whole, **options)
        optimizer = faststep.optim.AdamW(parts, **options)
        for step in range(3):
            for n, (mine, its) in enumerate(zip(parts, whole, strict=True)):
                its.grad = values(tuple(its.shape), 100 * step + n, dtype)
                mine.grad = given(cut(its.grad, mesh))
            reference.step()
            optimizer.step()
            started.synchronize()
            for n, (mine, its) in enumerate(zip(parts, whole, strict=True)):
                state, its_state = optimizer.state[mine], reference.state[its]
                codes = "state_scales" in state
                if codes != ("state_scales" in its_state):
                    continue  # rows of fewer than 64 elements, and parts within blocks
                assert same_bits(part_of(mine), part_of(cut(its.detach(), mesh))), n
                for key, value in state.items():
                    if key != "state_scales" and key != "step":
                        assert same_bits(part_of(value), part_of(cut(its_state[key], mesh))), key
            optimizer.load_state_dict(optimizer.state_dict(native=step % 2 == 0))
            if step % 2:
                reference.load_state_dict(reference.state_dict())
        coded = ["state_scales" in optimizer.state[mine] for mine in parts]
        assert coded == CODED[world]
