"""shard(offload="optimizer") on the fake device: the bits of the same without, and of the host."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from faststep.offloading import memory
from faststep.offloading.places import mark
from faststep.optim.param_shards import CHUNK
from offload.common import assert_same, bits
from ranks import on_cuda_cases, on_cuda_ranks
from zero import test_offloaded_shards as shards
from zero.common import differences, grads_for
from zero.test_offloaded_shards import BF16, F32, Run, adamw, both, plain, step

from . import fake, late, nccl
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


@on_cuda_cases([(2, "torch", True), (2, "faststep", False)])
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


@on_cuda_ranks(2, gather=("step", "forward"))
def test_parameters_do_not_come_again(rank: int, world: int, gather: Any) -> None:
    """The host has them already, though all-gathers move their version counters."""

    def counted(run: Run, rank: int) -> None:
        plain(run, rank)
        if run.handle is not None:
            places = run.handle._copies.places
            assert all(place.written == mark(param) for param, place in places)

    with offloading():
        both(rank, counted, adamw, [F32], stage=2, gather=gather, **THERE)


@on_cuda_ranks(2)
def test_slow_copies(rank: int, world: int) -> None:
    def paced(run: Run, rank: int) -> None:
        if run.handle is not None:
            run.handle._copies.pipe.pace(2e6, 2e6)
        plain(run, rank)

    with offloading():
        both(rank, paced, adamw, [F32], stage=2, **THERE)


@on_cuda_ranks(2)
def test_late_reads_before_a_step(rank: int, world: int) -> None:
    """A script's kernels find the parameters of before, though copies back run as early as may."""
    with offloading() as ranks:
        _check_reads(rank, ranks.late)


def _check_reads(rank: int, device: late.Late) -> None:
    run = Run("optimizer", adamw, [F32], SHAPES, DEVICE, stage=2)
    step(run, rank, 0)
    update, copies = run.handle.update, run.handle._copies

    def early(*args: Any) -> None:
        update(*args)
        copies.pipe.wait()
        copies.link._outgoing.synchronize()

    run.handle.update = early
    run.backward(grads_for(run.model, 1, rank))
    params = [param for param in run.model.parameters() if param.numel()]
    before = [fake.plain(param).clone() for param in params]
    found = [torch.zeros_like(values) for values in before]
    for param, values in zip(params, found, strict=True):
        device.copy_from(param, values)
    run.optimizer.step()
    device.current.synchronize()
    assert_same(bits(found), bits(before))
    assert differences(params, before) == [*range(len(params))]
