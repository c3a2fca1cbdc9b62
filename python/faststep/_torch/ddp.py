"""Private names of torch: backward passes and DistributedDataParallel."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel


def after_backward(callback: Callable[[], None]) -> None:
    """Call this at the end of the backward pass that runs; from within it only.

    Calls are made in the order in which they were asked for. Raises AttributeError where torch has
    no such list.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def current_backward() -> int:
    """The number of the backward pass that runs in this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def exposed_seconds(model: DistributedDataParallel) -> float:
    """Seconds of a backward pass in which a model communicates and does not compute, as it says.

    It measures its first ten passes, and each hundredth.
    """
    said = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    spent = said.get("avg_backward_comm_time", 0)
    return float(spent - said.get("avg_backward_compute_comm_overlap_time", 0)) / 1e9


def is_inside_backward() -> bool:
    """True if a pass that ends now is inside of another, as with reentrant checkpoints."""
    frame, depth = sys._getframe(), 0
    # On a CUDA device a pass ends in a thread of autograd's, below which there is no outer pass.
    outermost = 0 if isinstance(threading.current_thread(), threading._DummyThread) else 1
    while frame is not None:
        depth += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back  # type: ignore[assignment]
    return depth > outermost


def rebuild_buckets(model: torch.nn.Module) -> None:
    """Let DistributedDataParallel order its buckets now, after its first synchronized backward.

    Else it does so in the next forward: a broadcast, under no_sync() too, that waits for ranks
    which have no more data.
    """
    rebuild = getattr(getattr(model, "reducer", None), "_rebuild_buckets", None)
    if rebuild is not None:
        rebuild()
