"""Ranks for tests: processes with a gloo group over loopback, a port of the system's choice, and a
time limit on everything that waits."""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Collectives", "on_ranks"]

WAIT = 60  # seconds


def _run(
    work: Callable[..., Any], rank: int, world: int, port: int, send: Any, args: tuple
) -> None:
    try:
        torch.set_num_threads(1)
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=WAIT)
        )
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world,
            timeout=datetime.timedelta(seconds=WAIT),
        )  # fmt: skip
        result = work(rank, world, *args)
        dist.barrier()
        dist.destroy_process_group()
        send.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        send.send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise


def on_ranks(work: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """What `work(rank, world, *args)` returns on each rank."""
    spawn = multiprocessing.get_context("spawn")
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False,
        timeout=datetime.timedelta(seconds=WAIT),
    )  # fmt: skip
    pipes = [spawn.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        spawn.Process(target=_run, args=(work, rank, world, store.port, pipes[rank][1], args))
        for rank in range(world)
    ]
    try:
        for process in ranks:
            process.start()
        answers = []
        for receive, _ in pipes:
            assert receive.poll(2 * WAIT), "a rank gave no answer in time"
            answers.append(pickle.loads(receive.recv_bytes()))
        failures = [text for done, text in answers if not done]
        assert not failures, "\n".join(failures)
        for process in ranks:
            process.join(WAIT)
        return [result for _, result in answers]
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join(WAIT)


class Collectives:
    """Counts what the process group sends, from torch's functions and from the reducer in C++."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.reducer = self.direct = 0
        model.register_comm_hook(None, self._of_reducer)
        self._all_reduce = dist.all_reduce
        dist.all_reduce = self._counted

    def stop(self) -> None:
        dist.all_reduce = self._all_reduce

    def _of_reducer(self, _, bucket):  # torch looks at annotations, which must not be strings
        self.reducer += 1
        values = bucket.buffer().div_(dist.get_world_size())
        work = self._all_reduce(values, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.direct += 1
        return self._all_reduce(*args, **kwargs)

    def taken(self) -> tuple[int, int]:
        seen = self.reducer, self.direct
        self.reducer = self.direct = 0
        return seen
