"""Ranks for tests: processes with a gloo group over loopback, a port of the system's choice, and a
time limit on everything that waits.

Starting a process takes longer than any of these tests, so the processes are started once for all.
A test of `on_ranks` runs on each rank."""

import datetime
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

WAIT = 180  # seconds that a rank may wait for another, on a machine that is busy
PRELOADED = [  # none of these starts threads, which a fork would lose
    "torch._dynamo",  # the first optimizer imports it
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "faststep.zero",
]
PATIENCE = 600  # seconds in which some rank ends a job
END = ""  # the name of what a rank says last: why it failed, if it did


class Job(NamedTuple):
    """`work(rank, world, *args)`, to be called on each of `world` ranks."""

    name: str
    world: int
    work: Callable[..., Any]
    args: tuple[Any, ...] = ()


class _Body(NamedTuple):
    """The code of a test of `on_ranks`, found by its name in each rank; returns what failed."""

    module: str
    test: str

    def __call__(self, rank: int, world: int, *case: Any) -> str:
        try:
            getattr(importlib.import_module(self.module), self.test).body(rank, world, *case)
        except BaseException:  # pytest's own are not of Exception
            traceback.print_exc()  # at once: the other ranks may wait for this one
            return traceback.format_exc()
        return ""


Test = Callable[..., None]


def on_ranks(*worlds: int, **cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Makes a test of a function of rank and world, which asserts: on each rank of each world.

    Args:
        cases: by the names of its other arguments, in their order: values that print themselves.
    """
    return on_cases(itertools.product(worlds, *cases.values()))


def on_cases(cases: Iterable[tuple[Any, ...]]) -> Callable[[Test], Test]:
    """The same where each case has a world of its own, before the test's other arguments."""
    return _on("ranks", "JOBS", cases)


def on_cuda_ranks(*worlds: int, **cases: Iterable[Any]) -> Callable[[Test], Test]:
    """The same in processes that may have a fake machine each, see tests/device."""
    return on_cuda_cases(itertools.product(worlds, *cases.values()))


def on_cuda_cases(cases: Iterable[tuple[Any, ...]]) -> Callable[[Test], Test]:
    """As on_cases, in such processes."""
    return _on("cuda_ranks", "CUDA_JOBS", cases)


def _on(fixture: str, listed: str, cases: Iterable[tuple[Any, ...]]) -> Callable[[Test], Test]:
    def made(body: Test) -> Test:
        run = _Body(body.__module__, body.__name__)
        name = f"{run.module}.{run.test} on"
        jobs = [
            Job(" ".join(map(str, (name, world, *case))), world, run, tuple(case))
            for world, *case in cases
        ]

        @pytest.mark.parametrize("job", jobs, ids=lambda job: job.name.partition(" on ")[2])
        def test(job: Job, request: pytest.FixtureRequest) -> None:
            for failure in request.getfixturevalue(fixture)(job.name):
                assert not failure, failure

        test.__module__, test.__doc__ = body.__module__, body.__doc__
        vars(test).update({listed: jobs, "body": body})
        return test

    return made


def assert_alike(tensors: Iterable[torch.Tensor]) -> None:
    """All ranks have the same bits."""
    for tensor in tensors:
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor.detach().contiguous())
        assert all(torch.equal(tensor, other) for other in others), others


def jobs_of(items: Iterable[Any], name: str = "JOBS") -> list[Job]:
    """The jobs of these tests, whose functions have a list of all under this name."""
    return [
        item.callspec.params["job"]
        for item in items
        if hasattr(getattr(item, "function", None), name)
    ]


def _work(rank: int, port: int, jobs: Sequence[Job], done: Callable[[str, Any], None]) -> None:
    """All jobs in which this rank takes part, the largest worlds first: nobody then waits long."""
    wait = datetime.timedelta(seconds=WAIT)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait)
    for world in sorted({job.world for job in jobs if rank < job.world}, reverse=True):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"world of {world}", store), rank=rank,
            world_size=world, timeout=wait,
        )  # fmt: skip
        for job in jobs:
            if job.world == world:
                done(job.name, job.work(rank, world, *job.args))
        dist.barrier()
        dist.destroy_process_group()


def _run(rank: int, port: int, jobs: Sequence[Job], send: Any) -> None:
    def done(name: str, result: Any) -> None:
        send.send_bytes(pickle.dumps((name, result)))

    try:
        gc.freeze()  # each collection would look through, and so copy, what the server has imported
        torch.set_num_threads(1)
        # A message that wakes its receiver must not interrupt the sender, which holds a lock for
        # which gloo's threads spin.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        _work(rank, port, jobs, done)
        done(END, "")
    except BaseException:
        done(END, traceback.format_exc())
        raise


def forked() -> Any:
    """Makes processes in a moment: forks of a server that has imported torch once."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


def results_of(jobs: Sequence[Job]) -> dict[str, list[Any]]:
    """What each job returned, by rank; skips tests where torch has no gloo."""
    if not dist.is_gloo_available():
        pytest.skip("torch has no gloo")
    spawn = forked()
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False,
        timeout=datetime.timedelta(seconds=WAIT),
    )  # fmt: skip
    count = max(job.world for job in jobs)
    pipes = [spawn.Pipe(duplex=False) for _ in range(count)]
    ranks = [
        spawn.Process(target=_run, args=(rank, store.port, jobs, pipes[rank][1]))
        for rank in range(count)
    ]
    try:
        for process, (_, send) in zip(ranks, pipes, strict=True):
            process.start()
            send.close()  # the rank has its own: its end is then the end of the pipe
        answers: list[dict[str, Any]] = [{} for _ in ranks]
        busy = {receive: rank for rank, (receive, _) in enumerate(pipes)}
        while busy:
            ready: list[Any] = connection.wait(busy, PATIENCE)
            assert ready, f"ranks {sorted(busy.values())} ended no job within {PATIENCE} s"
            for receive in ready:
                rank = busy[receive]
                try:
                    name, result = pickle.loads(receive.recv_bytes())
                except EOFError:
                    ranks[rank].join(WAIT)
                    code = ranks[rank].exitcode
                    raise AssertionError(f"rank {rank} ended with status {code}") from None
                answers[rank][name] = result
                if name == END:
                    del busy[receive]
        failures = [text for one in answers if (text := one[END])]
        assert not failures, "\n".join(failures)
        for process in ranks:
            process.join(WAIT)
        return {job.name: [answers[rank][job.name] for rank in range(job.world)] for job in jobs}
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join(WAIT)
