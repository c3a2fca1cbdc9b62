"""The rows of the CUDA benchmarks, the most important first."""

from __future__ import annotations

import os

import torch

from bench_rows import SMOKE
from contenders import OURS
from workloads import Shapes, Work, gpt2_small, resnet50

__all__ = [
    "FOREACH",
    "FUSED",
    "LARGE",
    "MANY",
    "NAMES",
    "PLAIN",
    "REHEARSAL",
    "TINY",
    "cuda_works",
    "shapes_of",
]

# On the CPU, to see that the benchmarks themselves work.
REHEARSAL = os.environ.get("FASTSTEP_FAKE_GPU") == "1"
TINY = SMOKE or REHEARSAL

FUSED = "torch fused"
FOREACH = "torch default (foreach)"
LARGE = ("ResNet-50", "GPT-2 small", "Llama-1B")
MANY = "5000 x 1024"
PLAIN = "300 x 1024"
SOME = "2000 x 1024"
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def llama_1b() -> Shapes:
    """Parameter shapes of Llama 3.2 1B: 146 tensors, 1.24 G elements, embeddings tied."""
    d, keys, hidden = 2048, 512, 8192
    layer = (
        (d, d),
        (keys, d),
        (keys, d),
        (d, d),
        (hidden, d),
        (hidden, d),
        (d, hidden),
        (d,),
        (d,),
    )
    return ((128256, d), *(layer * 16), (d,))


def shapes_of(name: str) -> Shapes:
    """The parameters' shapes of a set; smaller and fewer ones in a rehearsal."""
    shapes = {
        "ResNet-50": resnet50(),
        "GPT-2 small": gpt2_small(),
        "Llama-1B": llama_1b(),
        MANY: ((1024,),) * 5000,
        PLAIN: ((1024,),) * 300,
        SOME: ((1024,),) * 2000,
    }
    if TINY:
        return tuple(tuple(min(8, n) for n in shape) for shape in shapes[name][:24])
    return shapes[name]


FEW = ("bf16", "int8")  # types of states


def cuda_works() -> list[Work]:
    """The chain in fp32, what one does without a loss scale in bf16, and the plain step in both,
    also on gradients as in buckets of DistributedDataParallel."""
    sets = (*LARGE, MANY)
    plain = (OURS, FUSED, FOREACH)  # compiling takes its time: only where clipping is measured
    rows = [
        *(("cuda chain", name, torch.float32, ()) for name in sets),
        *(("cuda clip", name, torch.bfloat16, ()) for name in sets),
        *(("cuda adamw", name, torch.float32, plain) for name in (PLAIN, SOME)),
        *(("cuda adamw", name, torch.float32, plain) for name in sets),
        *(("cuda adamw", name, torch.bfloat16, plain) for name in sets),
        *((f"cuda {few} states", name, torch.float32, ()) for few in FEW for name in LARGE),
        *(("cuda unaligned", "GPT-2 small", dtype, plain) for dtype in NAMES),
    ]
    return [
        Work(family, f"{name}, {NAMES[dtype]}", shapes_of(name), dtype=dtype, only=only)
        for family, name, dtype, only in rows
    ]
