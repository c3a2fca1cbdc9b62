"""Runs a script of this folder once per rank, and lets the ranks meet through gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class UnavailableError(Exception):
    """A package is missing; the message says which."""


def run_on_ranks(script: str, ranks: int, *args: object) -> Any:
    """What rank 0 of a script in this folder answers; a reason as text where it cannot run."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, args)]
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            "WORLD_SIZE": str(ranks),
            "STORE": str(Path(folder) / "store"),
            "GLOO_SOCKET_IFNAME": "lo",
            # DeepSpeed wants them; the group is there before it looks.
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{args}: a rank ended with {process.returncode}:\n{errors[-4000:]}")
    return json.loads(outputs[0][0].splitlines()[-1])


@contextmanager
def _group() -> Iterator[int]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{os.environ['STORE']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        yield rank
        dist.barrier()
    finally:
        dist.destroy_process_group()


def answer_of(measure: Callable[[], Any]) -> None:
    """In a rank: measure with one thread, and let rank 0 print the answer."""
    torch.set_num_threads(1)
    with _group() as rank:
        try:
            answer = measure()
        except UnavailableError as error:
            answer = str(error)
        if rank == 0:
            print(json.dumps(answer))
