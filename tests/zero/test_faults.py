"""Ranks that fail: the others say which parameters they waited for, and do not hang."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from faststep import zero

from .common import Given, grads_for

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
TIMEOUT = 10  # seconds, of the process group
FAULTS = ("dies", "raises in backward", "skips backward", "dies before step")


def _rank(rank: int, port: int, faults: tuple[str, ...], send: Any) -> None:
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch's compiler: seconds
    wait = datetime.timedelta(seconds=TIMEOUT)
    long = datetime.timedelta(seconds=300)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=long)
    said = {}
    for fault in faults:
        if rank == 0:
            store.set(f"turn of {fault}", "")
        store.wait([f"turn of {fault}"], long)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(fault, store), rank=rank, world_size=2, timeout=wait
        )
        model = Given([(300, 30), (40,)], [torch.float32])
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=1e-4)
        before = [p.detach().clone() for p in model.parameters()]
        start = time.monotonic()
        try:
            if rank == 1:
                _fail(fault, model)
            model(grads_for(model, rank)).backward()
            if rank == 1 and fault == "dies before step":
                os._exit(0)
            optimizer.step()
            error = "no error"
        except RuntimeError as caught:
            error = str(caught)
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        said[fault] = error, same, time.monotonic() - start
        if rank == 0:
            dist.destroy_process_group()
    send.send(said)


def _fail(fault: str, model: Given) -> None:
    if fault == "dies":
        os._exit(0)
    if fault == "raises in backward":

        def hook(_: Any) -> None:
            raise ValueError("planted")

        model.p0.register_hook(hook)
        try:
            model(grads_for(model, 1)).backward()
        except ValueError:
            time.sleep(TIMEOUT + 2)
        os._exit(0)
    if fault == "skips backward":
        time.sleep(TIMEOUT + 2)
        os._exit(0)


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[str, bool, float]]:
    """What rank 0 says when rank 1 fails in each way; a process per failing rank."""
    spawn = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    receive, send = spawn.Pipe(duplex=False)
    tasks = [(0, FAULTS), *((1, (fault,)) for fault in FAULTS)]
    ranks = [spawn.Process(target=_rank, args=(rank, store.port, f, send)) for rank, f in tasks]
    try:
        for process in ranks:
            process.start()
        assert receive.poll(400), "rank 0 hangs"
        found: dict[str, tuple[str, bool, float]] = receive.recv()
        return found
    finally:
        for process in ranks:
            process.kill()
            process.join(20)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_other_rank_does_not_hang(
    fault: str, answers: dict[str, tuple[str, bool, float]]
) -> None:
    error, same, seconds = answers[fault]
    assert error.startswith("rank 0: "), error
    assert "'p1'" in error or "'p0'" in error or "counting" in error, error
    assert seconds < 3 * TIMEOUT
    assert same or fault == "dies before step"
