"""Host time of a CUDA step without a GPU: python benchmarks/host.py TENSORS BLOCKS ROUNDS.

Prints the seconds of every round as JSON. The driver is the fake one of the tests, with kernels
that do nothing, and torch's plain CPU tensors claim to lie in its memory, so that everything up to
the launch is what a real step does. torch's fused optimizer steps the same tensors as what they
are, CPU tensors of size 1. It needs a process of its own: the claim holds for all tensors.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import faststep
from contenders import OURS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from device import fake
from nvcc import KERNELS


class SimtKernel(ctypes.Structure):
    """`simt_kernel` of tests/cuda/simt.h; its size is that of the struct in csrc/base/device.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("launch_size", ctypes.c_size_t),
        ("run", ctypes.c_void_p),
    )


class FakeKernel(ctypes.Structure):
    """`fake_cuda_kernel` of tests/cuda/fake_cuda.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("args_size", ctypes.c_size_t),
        ("run", ctypes.c_void_p),
        ("user", ctypes.c_void_p),
    )


def empty_kernels(library: ctypes.CDLL) -> ctypes.Array[FakeKernel]:
    """The table of all kernels, of which none does anything; it must stay."""
    library.simt_find.restype = ctypes.POINTER(SimtKernel)
    found = [library.simt_find(name.encode()).contents for name in sorted(KERNELS)]
    table = (FakeKernel * len(found))(*[FakeKernel(k.name, k.launch_size) for k in found])
    library.fake_cuda_use(table, ctypes.c_size_t(len(found)))
    return table


def claim_all(library: ctypes.CDLL) -> None:
    """From now on every tensor says to the extension that it lies on the fake device."""
    original = fake._capsule_pointer(getattr(torch.Tensor, fake.API))
    claiming = library.claim_api(ctypes.c_void_p(original), 0)
    setattr(torch.Tensor, fake.API, fake._capsule(claiming))
    library.claim_stream(0, ctypes.c_void_p(library.fake_cuda_stream(0)))
    faststep._C.use_streams(lambda device, stream: True)


def seconds(step: Callable[[], object], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def main(tensors: int, blocks: int, rounds: int) -> None:
    library = fake.library()
    kernels = empty_kernels(library)
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    claim_all(library)
    contenders = {
        OURS: faststep.optim.AdamW(parameters),
        "torch fused": torch.optim.AdamW(parameters, fused=True),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for optimizer in contenders.values():
        seconds(optimizer.step, 3)  # makes states and plans
    before = library.fake_cuda_calls(b"cuLaunchKernel")
    for _ in range(blocks):
        for name, optimizer in contenders.items():
            times[name] += seconds(optimizer.step, rounds)
    launches = library.fake_cuda_calls(b"cuLaunchKernel") - before
    complaint = library.fake_cuda_complaint()
    if complaint or launches != 2 * blocks * rounds:
        raise SystemExit(f"{launches} launches in {blocks * rounds} steps; {complaint}")
    print(json.dumps(times))
    del kernels


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
