"""Ranks that fail: the others say which parameters they waited for, and do not hang."""

from __future__ import annotations

import datetime
import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accumulate.processes import forked
from faststep import zero

from .common import Given, grads_for

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
TIMEOUT = 10  # seconds, of the process group
WORLD = 3
FAULTS = ("dies", "raises in backward", "skips backward", "dies before step")


def _rank(rank: int, port: int, fault: str, send: Any) -> None:
    """One of three ranks, of which the last one fails."""
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=TIMEOUT)
    long = datetime.timedelta(seconds=300)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=long)
    store.add("ready", 1)
    while store.add("ready", 0) < WORLD * len(FAULTS):  # imports take longer than the timeout
        time.sleep(0.1)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(fault, store), rank=rank, world_size=WORLD, timeout=wait
    )
    model = Given([(300, 30), (40,)], [torch.float32])
    optimizer = zero.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=1e-4, max_grad_norm=1.0
    )
    before = [p.detach().clone() for p in model.parameters()]
    start = time.monotonic()
    try:
        if rank == WORLD - 1:
            _fail(fault, model)
        model(grads_for(model, rank)).backward()
        if rank == WORLD - 1 and fault == "dies before step":
            os._exit(0)
        optimizer.step()
        error = "no error"
    except RuntimeError as caught:
        error = str(caught)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    send.send((error, same, time.monotonic() - start))


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


Answers = dict[str, list[tuple[str, bool, float]]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """What the other ranks say when the last one fails in each way; all at once, as they wait."""
    spawn = forked()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tasks = [(rank, fault) for fault in FAULTS for rank in range(WORLD)]
    pipes = {task: spawn.Pipe(duplex=False) for task in tasks}
    processes = [
        spawn.Process(target=_rank, args=(rank, store.port, fault, pipes[rank, fault][1]))
        for rank, fault in tasks
    ]
    try:
        for process in processes:
            process.start()
        found: Answers = {fault: [] for fault in FAULTS}
        for (rank, fault), (receive, _) in pipes.items():
            if rank < WORLD - 1:
                assert receive.poll(400), f"rank {rank} hangs: {fault}"
                found[fault].append(receive.recv())
        return found
    finally:
        for process in processes:
            process.kill()
            process.join(20)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_other_ranks_do_not_hang(fault: str, answers: Answers) -> None:
    named = []
    for rank, (error, same, seconds) in enumerate(answers[fault]):
        assert error.startswith(f"rank {rank}: "), error
        missing = re.search(r" failed \(not reported by ranks? ([0-9, ]+) within", error)
        assert missing, error
        named.append(missing[1].split(", "))
        assert "'p1'" in error or "'p0'" in error or "counting" in error or "norm" in error, error
        assert seconds < 3 * TIMEOUT
        assert same or fault == "dies before step"
    assert all("2" in ranks for ranks in named)
    assert ["2"] in named, named  # the last one to fail knows of the others
