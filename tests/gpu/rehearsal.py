"""Lets these tests run without a GPU: the fake machine of tests/device, and stand-ins for what
they use of torch.cuda.

So they run where no GPU is. It shows that the tests work, not
that the hardware does: torch's own operators run on the CPU, at once, and nothing is late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from device import fake
from faststep import _C
from faststep._torch.streams import lasts


class Stream:
    current: Stream

    def __init__(self, machine: fake.Machine, ordinal: int = 0) -> None:
        self.machine, self.ordinal = machine, ordinal
        self.handle = self.cuda_stream = machine.stream(ordinal)

    def wait_stream(self, other: Stream) -> None:
        self.machine.synchronize()

    def synchronize(self) -> None:
        self.machine.synchronize()


class ExternalStream(Stream):
    def __init__(self, handle: int, device: int = 0) -> None:
        self.ordinal, self.handle, self.cuda_stream = device, handle, handle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExternalStream) and self.handle == other.handle

    def __hash__(self) -> int:
        return hash(self.handle)


class Graph:
    """torch.cuda.CUDAGraph, of our launches only."""

    def __init__(self, machine: fake.Machine) -> None:
        self.machine = machine
        self.handle: Any = None
        self.memory: list[torch.Tensor] = []  # what the captured work writes, as in torch's pool

    def replay(self) -> None:
        self.machine.replay(self.handle, Stream.current.handle)
        self.machine.synchronize()


@contextmanager
def running(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CUDA machine with two devices for one test."""
    machine = fake.start(patch)
    _C.use_streams(lasts)
    assert machine.complaint() is None
    Stream.current = Stream(machine)
    machine.use(Stream.current.handle)
    capturing = []

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        before, Stream.current = Stream.current, stream
        machine.use(stream.handle, stream.ordinal)
        try:
            yield
        finally:
            Stream.current = before
            machine.use(before.handle, before.ordinal)

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        stream = Stream(machine)
        empty = torch.empty

        def kept(*args: Any, **kwargs: Any) -> torch.Tensor:
            graph.memory.append(empty(*args, **kwargs))
            return graph.memory[-1]

        with use(stream), pytest.MonkeyPatch.context() as only_here:
            only_here.setattr(torch, "empty", kept)
            machine.capture(stream.handle)
            capturing.append(graph)
            try:
                yield
            finally:
                capturing.pop()
                graph.handle = machine.captured(stream.handle)

    def set_sync_debug_mode(mode: str) -> None:
        fake.waiting_is_an_error = mode == "error"

    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "is_initialized", lambda: True)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    patch.setattr(torch.cuda, "device_count", lambda: 2)
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 0))
    patch.setattr(torch.cuda, "synchronize", lambda device=None: machine.synchronize())
    patch.setattr(torch.cuda, "set_sync_debug_mode", set_sync_debug_mode)
    patch.setattr(fake, "waiting_is_an_error", False)
    patch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    patch.setattr(torch.cuda, "device", lambda device: nullcontext())
    patch.setattr(torch.cuda, "Stream", lambda: Stream(machine))
    patch.setattr(torch.cuda, "ExternalStream", ExternalStream)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current)
    patch.setattr(torch.cuda, "stream", use)
    patch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(machine))
    patch.setattr(torch.cuda, "graph", capture)
    yield
    machine.synchronize()
    fake.free_allocated()
    assert machine.complaint() is None
