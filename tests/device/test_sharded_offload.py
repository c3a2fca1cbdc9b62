"""shard(offload="optimizer") on the fake device: the bits of the same without, and of the host."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from faststep.offloading import memory
from faststep.optim.param_shards import CHUNK
from ranks import on_cuda_ranks
from zero import test_offloaded_shards as shards
from zero.test_offloaded_shards import BF16, F32, adamw, both, plain

from . import nccl
from .test_sharded import DEVICE, machine

# several tiles, of which the ranks' slices cut one; a chunk and one element; less than a chunk, ...
SHAPES = [(300, 130), (70,), (), (0, 4), (16385,), (40, 77), (5, 4, 3, 3), (3,)]
THERE: dict[str, Any] = {"place": DEVICE, "shapes": SHAPES, "beside_host": True}


@contextlib.contextmanager
def offloading() -> Iterator[nccl.Nccl]:
    """A machine on which tiles are a chunk each; nothing of the offload may be left."""
    with machine() as ranks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_TILE", CHUNK)
        before = ranks.late.living().registered
        yield ranks
        gc.collect()
        assert ranks.late.living().registered == before


FORMATS: dict[str, tuple[list[torch.dtype], dict[str, Any]]] = {
    "fp32": ([F32], {}),
    "masters": ([BF16, F32], {"master_weights": True}),
}


@on_cuda_ranks(2, name=FORMATS, gather=("step", "forward"))
def test_types(rank: int, world: int, name: str, gather: Any) -> None:
    dtypes, options = FORMATS[name]
    with offloading():
        stage: Any = 1 if gather == "step" else 2
        both(rank, plain, adamw, dtypes, stage=stage, gather=gather, **options, **THERE)


@on_cuda_ranks(2, name=("codes and halves", "noise and halves", "clipped"))
def test_few_bits(rank: int, world: int, name: str) -> None:
    with offloading():
        shards.check_few_bits(rank, name, **THERE)


@on_cuda_ranks(2, how=("no_sync", "accumulate", "clip", "clip by torch", "set"))
def test_loops(rank: int, world: int, how: str) -> None:
    with offloading():
        shards.check_loop(rank, how, stage=1 + ("clip" in how), **THERE)


@on_cuda_ranks(2, scaler=("torch", "faststep"), clips=(True, False))
def test_scalers(rank: int, world: int, scaler: str, clips: bool) -> None:
    with offloading():
        shards.check_scaler(rank, scaler, clips, False, **THERE)


@on_cuda_ranks(2, name=("codes and halves", "noise"))
def test_states_change_sides(rank: int, world: int, name: str) -> None:
    with offloading():
        shards.check_sides(rank, name, **THERE)


@on_cuda_ranks(2)
def test_groups_that_change(rank: int, world: int) -> None:
    with offloading():
        shards.check_groups(rank, **THERE)
