"""Ranks that fail: the others say which parameters they waited for, and do not hang."""

import datetime
import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from faststep import zero
from faststep.zero.transport import group
from ranks import forked

from .common import Given, grads_for

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
TIMEOUT = 6  # seconds, of the process group, and in which ranks report to each other
WORLD = 3
FAULTS: dict[str, Any] = {  # and the stage
    "dies": 2,
    "raises in backward": 1,
    "skips backward": 2,
    "dies before step": 2,
    "skips a step": 1,
    "leaves before step": 3,
}


def _rank(rank: int, port: int, fault: str, send: Any) -> None:
    """One of three ranks, of which the last one fails."""
    torch.set_num_threads(1)
    group.PATIENCE = TIMEOUT
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
        model, torch.optim.SGD(model.parameters(), lr=0.1), stage=FAULTS[fault], bucket_mb=1e-4,
        max_grad_norm=1.0,
    )  # fmt: skip
    before = _values(model)
    start = time.monotonic()
    try:
        if rank == WORLD - 1:
            _fail(fault, model)
        model(grads_for(model, rank)).backward()
        if rank == WORLD - 1:
            _fail_before_step(fault, model)
        optimizer.step()
        error = "no error"
    except RuntimeError as caught:
        error = str(caught)
    same = all(map(torch.equal, before, _values(model)))
    send.send((error, same, time.monotonic() - start))


def _values(model: Given) -> list[torch.Tensor]:
    """What this rank has of the parameters."""
    params: list[Any] = list(model.parameters())
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in params]
    return [part.detach().clone() for part in parts]


def _fail_before_step(fault: str, model: Given) -> None:
    if fault == "dies before step":
        os._exit(0)
    if fault == "leaves before step":
        time.sleep(TIMEOUT + 2)
        os._exit(0)
    if fault == "skips a step":  # the others step, and gather what this rank never sends
        model(grads_for(model, 7)).backward()


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
        if fault == "skips a step":
            missing = re.search(r"rank ([0-9]) failed at reducing the parameters from 'p1'", error)
        else:
            missing = re.search(r" failed \(not reported by ranks? ([0-9, ]+) within", error)
        assert missing, error
        named.append(missing[1].split(", "))
        if fault == "leaves before step":
            assert "comparing the ranks" in error, error
        else:
            assert "'p1'" in error or "'p0'" in error or "norm" in error, error
        assert seconds < 4 * TIMEOUT
        assert same or fault in ("dies before step", "skips a step")
    assert all("2" in ranks for ranks in named)
    assert ["2"] in named, named  # the last one to fail knows of the others
