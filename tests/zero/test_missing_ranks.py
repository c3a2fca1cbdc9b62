"""Calls that all ranks must make, made by some of them: an error soon, and training goes on."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from faststep import zero
from faststep._torch.ranks import meet
from faststep.zero.transport import group
from ranks import WAIT, on_ranks

from .common import Given, differences, grads_for

SOON = 0.5  # seconds in which ranks are to come
CASES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {},
    "forward": {"gather": "forward"},
    "wrapped": {"wrapped": True},
}
ALONE = (
    "rank 0: all ranks must call state_dict() together, and ranks 1, 2 did not within 0.5 s "
    "(timeout= of shard()); nothing was sent, and training can go on"
)


def _train(rank: int, wrapped: bool = False, between: Any = None, **options: Any) -> Any:
    """The model after four steps; `between(optimizer)` comes after the second one, if given."""
    inside = Given([(300, 70), (40,), (33000,)], [torch.float32])
    model = DistributedDataParallel(inside) if wrapped else inside
    first = torch.optim.AdamW(inside.parameters(), lr=0.01)
    with _all_come():
        optimizer = zero.shard(model, first, bucket_mb=0.01, timeout=SOON, **options)
    said = []
    for step in range(4):
        model(grads_for(inside, rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and between is not None:
            said.append(between(optimizer))
    optimizer.wait()
    return inside, optimizer, said


def _error(call: Callable[[], Any]) -> tuple[str, bool]:
    """What it raises, and whether that was soon."""
    start = time.monotonic()
    try:
        call()
        text = "no error"
    except RuntimeError as error:
        text = str(error)
    return text, time.monotonic() - start < WAIT / 2


@contextlib.contextmanager
def _all_come() -> Iterator[None]:
    """However late, as on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "meet", lambda ranks, what, _: meet(ranks, what, WAIT))
        yield


def _error_of_all(call: Callable[[], Any]) -> tuple[str, bool]:
    with _all_come():
        return _error(call)


def _save_on(ranks: tuple[int, ...], rank: int) -> Callable[[Any], Any]:
    return lambda optimizer: _error(optimizer.state_dict) if rank in ranks else None


@on_ranks(3, case=CASES)
def test_a_call_on_rank_0_alone_disturbs_nothing(rank: int, world: int, case: str) -> None:
    """It saves; the others are in their next backward meanwhile."""
    options = CASES[case]
    model, optimizer, said = _train(rank, between=_save_on((0,), rank), **options)
    plain, other, _ = _train(rank, **options)
    with _all_come():
        mine, theirs = optimizer.state_dict(), other.state_dict()
    states = [
        [value for state in saved["state"].values() for value in state.values()]
        for saved in (mine, theirs)
    ]
    assert said[0] == (None if rank else (ALONE, True))
    assert differences(model.parameters(), plain.parameters()) == differences(*states) == []
    assert rank or len(states[0]) == 9


@on_ranks(3)
def test_whoever_calls_hears_who_is_missing(rank: int, world: int) -> None:
    """All but the last rank call, then all; a late rank; other calls on each rank."""
    said: dict[str, Any] = {}

    def between(optimizer: Any) -> None:
        for number in range(3):  # ranks are off by one call, and then by more
            dist.barrier()
            said[f"some {number}"] = _save_on((0, 1), rank)(optimizer)
        dist.barrier()
        said["together"] = _error_of_all(optimizer.state_dict)
        if rank == 1:
            time.sleep(3 * SOON)
        said["late"] = _error(optimizer.state_dict)
        dist.barrier()
        said["after"] = _error_of_all(optimizer.state_dict)
        with _all_come():
            dist.broadcast_object_list(box := [optimizer.state_dict()])
        load = lambda: optimizer.load_state_dict(box[0])  # noqa: E731
        said["load"] = _error_of_all(load if rank == 0 else optimizer.state_dict)
        dist.barrier()
        if rank == 2:
            del box[0]["param_groups"][0]["params"][0]
        said["other"] = _error_of_any(lambda: optimizer.load_state_dict(box[0]))
        dist.barrier()
        dcp = lambda: get_optimizer_state_dict(model_of(optimizer), optimizer)  # noqa: E731
        said["dcp"] = _error_of_all(dcp if rank == 2 else optimizer.state_dict)
        said["dcp on all"] = _error_of_all(dcp)

    def model_of(optimizer: Any) -> Any:
        model = Given([(300, 70), (40,), (33000,)], [torch.float32])
        for name, param in zip(
            ("p0", "p1", "p2"), optimizer.param_groups[0]["params"], strict=True
        ):
            setattr(model, name, param)
        return model

    model, *_ = _train(rank, between=between)
    plain, *_ = _train(rank)
    assert differences(model.parameters(), plain.parameters()) == []
    for number in range(3):
        text = said[f"some {number}"]
        assert (text is None) if rank == 2 else ("and rank 2 did not within" in text[0])
    assert said["together"] == said["after"] == said["dcp on all"] == ("no error", True)
    absent = "ranks 0, 2" if rank == 1 else "rank 1"
    assert f"and {absent} did not within 0.5 s" in said["late"][0]
    met = "load_state_dict() together, and rank 1 called state_dict(); rank 2 called state_"
    assert (met if rank == 0 else "and rank 0 called load_state_dict();") in said["load"][0]
    if rank == 2:
        assert "parameter group" in said["other"][0]
        return
    text = "all ranks must call load_state_dict() together, and rank 2 did not"
    assert text in said["other"][0]
    text = f"rank {rank}: all ranks must call state_dict() together, and rank 2 called "
    assert text in said["dcp"][0]
    assert "state_dict() (slices)" in said["dcp"][0]


def _error_of_any(call: Callable[[], Any]) -> tuple[str, bool]:
    try:
        return _error(call)
    except ValueError as error:
        return str(error), True


@on_ranks(3)
def test_shard_on_one_rank(rank: int, world: int) -> None:
    """`shard` itself, on one rank alone, at each stage, then on all."""
    for stage in (1, 2, 3):
        model = Given([(300, 70), (40,)], [torch.float32])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shard = lambda m=model, o=optimizer, s=stage: zero.shard(m, o, stage=s, timeout=SOON)  # noqa: E731
        if rank == 1:
            text = "rank 1: all ranks must call shard() together, and ranks 0, 2 did not within"
            assert _error(shard)[0].startswith(text)
        dist.barrier()
        assert _error_of_all(shard) == ("no error", True)


@on_ranks(4)
def test_a_node_that_calls_alone(rank: int, world: int) -> None:
    """Two nodes of two ranks."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    options = {"process_group": inside, "replicate_group": across}
    model, optimizer, said = _train(rank, between=_save_on((0, 1), rank), **options)
    plain, *_ = _train(rank, **options)
    after = _error_of_all(optimizer.state_dict)
    text = "rank 0: all ranks must call state_dict() together, and rank 1 did not within"
    assert (said[0] is None) if rank > 1 else said[0][0].startswith(text)
    assert differences(model.parameters(), plain.parameters()) == []
    assert after == ("no error", True)
