"""Looks at a script's objects, when it has trained for a while and will not go on."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from .._torch.ddp import exposed_seconds

PROCESS, SYSTEM = Path("/proc/self"), Path("/sys")
READS = 4  # samples of a dataset that are read again
DECODES = re.compile(r"decompress|decode|load|read|open|parse|fromstring|frombuffer|genfromtxt")
LEAST_KEPT = 20  # graphs that a variable keeps
_LARGEST = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float64: 2.0**-1022}


class LoaderUse:
    """How a DataLoader is used."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.iterators = 0
        self.batches = 0
        self.wait = self.starting = 0.0  # seconds; starting: for workers to start and to end

    def begin(self, iterator: Any, seconds: float) -> None:
        """Note a new iterator, which it took so long to make."""
        self.iterators += 1
        self.starting += seconds
        self.wait += seconds
        iterator._faststep_use = self
        iterator._faststep_is_new = True

    @staticmethod
    def waited(iterator: Any, seconds: float, is_last: bool) -> None:
        """Note the wait for a batch of an iterator, or for its workers to end."""
        use = getattr(iterator, "_faststep_use", None)
        if use is None:
            return
        use.batches += 1
        use.wait += seconds
        if iterator._faststep_is_new or is_last:
            use.starting += seconds
            iterator._faststep_is_new = False

    @property
    def is_pageable(self) -> bool:
        """True if a device waits for batches that do not lie in page-locked memory."""
        has_device: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return has_device and not self.loader.pin_memory

    def described(self) -> dict[str, Any]:
        """The facts that findings need, as JSON has them."""
        loader = self.loader
        context = loader.multiprocessing_context or multiprocessing
        return {
            "iterators": self.iterators,
            "batches": self.batches,
            "wait": self.wait,
            "starting": self.starting,
            "workers": loader.num_workers,
            "batch": loader.batch_size,
            "persistent": bool(loader.persistent_workers),
            "is_pageable": self.is_pageable,
            "method": context.get_start_method(),
            "decodes": self._decodes(),
        }

    def _decodes(self) -> float:
        """The share of reading a sample that decoding takes, if the same bits come each time."""
        dataset = self.loader.dataset
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            return 0.0
        seconds = {"decoding": 0.0, "all": 0.0}
        stack: list[tuple[float, bool]] = []

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            if event in ("c_call", "call"):
                name = argument.__name__ if event == "c_call" else frame.f_code.co_name
                stack.append((time.perf_counter(), bool(DECODES.search(name))))
            elif event in ("c_return", "c_exception", "return") and stack:
                begun, is_decoder = stack.pop()
                if is_decoder and not any(outer for _, outer in stack):
                    seconds["decoding"] += time.perf_counter() - begun

        count = min(READS, len(dataset))
        try:
            for index in range(count):
                before = torch.get_rng_state()
                begun = time.perf_counter()
                sys.setprofile(profile)
                try:
                    one = dataset[index]
                finally:
                    sys.setprofile(None)
                seconds["all"] += time.perf_counter() - begun
                is_random = not torch.equal(before, torch.get_rng_state())
                if is_random or not _are_equal(one, dataset[index]):
                    return 0.0
        except Exception:  # of the script's code, which says only that it cannot be read again
            return 0.0
        return seconds["decoding"] / seconds["all"] if seconds["all"] else 0.0


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if hasattr(one, "__array__"):
        return bool((one == other).all())
    return bool(one == other)


def described(optimizer: Optimizer, steps: int) -> dict[str, Any]:
    """An optimizer, as findings need to know it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    kind = type(optimizer)
    step = inspect.unwrap(kind.step)
    place = [step.__code__.co_filename, step.__code__.co_firstlineno]
    is_whole = not kind.__module__.startswith("faststep.zero")  # else all ranks had to read them
    grads = [param.grad for param in params if is_whole and param.grad is not None]
    states = [
        value
        for state in optimizer.state.values()  # of slices, where an optimizer is sharded
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    return {
        "class": kind.__qualname__,
        "module": kind.__module__,
        "place": place,
        "steps": steps,
        "tensors": len(params),
        "bytes": sum(param.nbytes for param in params),
        "moved": sum(3 * param.nbytes for param in params) + sum(2 * one.nbytes for one in states),
        "denormals": _denormals([*params, *grads, *states]),
    }


def _denormals(tensors: list[torch.Tensor]) -> float:
    """The largest share of a tensor's elements that are denormal."""
    most = 0.0
    for tensor in tensors:
        limit = _LARGEST.get(tensor.dtype)
        if limit is not None and tensor.numel():
            sizes = tensor.detach().abs()
            most = max(most, float(((sizes < limit) & (sizes > 0)).float().mean()))
    return most


def exposed() -> float | None:
    """Seconds of a step in which models of DistributedDataParallel wait for each other.

    None if there are no such models.
    """
    if not torch.distributed.is_initialized():
        return None
    models = [one for one in gc.get_objects() if type(one) is DistributedDataParallel]
    return sum(map(exposed_seconds, models)) if models else None


def kept_graph(frame: FrameType | None, steps: int) -> list[Any] | None:
    """The name and the place of a variable that keeps the graphs of half of all steps, or more.

    The name is empty where no variable of the stack is it.
    """
    limit = max(LEAST_KEPT, steps / 2)
    while frame is not None:
        for name, value in list(frame.f_locals.items()):
            if _depth(value) > limit:
                return [name, frame.f_code.co_filename, frame.f_lineno]
        frame = frame.f_back
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    if _depth(tensors) > limit or any(_depth(one) > limit for one in tensors):
        return ["", "", 0]
    return None


def _depth(value: Any) -> int:
    """How many additions lie one behind another in a tensor's graph, or tensors in a list."""
    if isinstance(value, (list, tuple)):
        return sum(1 for one in value if isinstance(one, torch.Tensor) and one.grad_fn is not None)
    if not isinstance(value, torch.Tensor):
        return 0
    return sum(1 for _ in _sums(value.grad_fn))


def _sums(node: Any) -> Iterator[Any]:
    while node is not None and type(node).__name__.startswith("Add"):
        yield node
        following = [other for other, _ in node.next_functions if other is not None]
        node = next((one for one in following if type(one).__name__.startswith("Add")), None)
