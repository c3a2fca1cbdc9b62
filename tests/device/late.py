"""torch.cuda's streams, events, memory and copies on the fake driver: everything runs late.

What torch does on its own is here as torch does it: memory of a stream is used again by that stream
as soon as its last tensor is gone, unless `record_stream` named another stream, whose work is then
waited for by events. But pinned memory goes back to the driver at once, as memory would that torch
does not know, so that a copy which still reads it is a complaint.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from . import fake

FOR_ORDER_ONLY = 2  # CU_EVENT_DISABLE_TIMING


class Late:
    """Device 0 of a fake machine, as torch.cuda shows it.

    Args:
        machine: whose driver it is.
        lag: operations that a stream holds back.
    """

    def __init__(self, machine: fake.Machine, lag: int = 10_000) -> None:
        self.machine = machine
        self.streams = 0
        self.allocated = 0
        self._free: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._waiting: list[tuple[tuple[int, int], int, list[Event]]] = []
        self._read_into: list[torch.Tensor] = []  # memory that the driver will write to
        self._lent: dict[int, list[Stream]] = {}
        self.default = self.current = Stream(self)
        machine.use(self.default.handle)
        machine.lag(lag)

    def call(self, name: str, *arguments: Any) -> int:
        """An entry point of the driver."""
        self.machine.library.fake_cuda_enter(0)
        try:
            return int(getattr(self.machine.library, name)(*arguments))
        finally:
            self.machine.library.fake_cuda_leave()

    def must(self, name: str, *arguments: Any) -> None:
        code = self.call(name, *arguments)
        assert code == 0, f"{name} returned {code}"

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        self.machine.use(stream.handle)
        try:
            yield
        finally:
            self.current = before
            self.machine.use(before.handle)

    def tensor(self, address: int, size: int, like: torch.Tensor, last: Any) -> torch.Tensor:
        """A tensor over memory; `last` is called when the last one over it is gone."""
        memory = (ctypes.c_ubyte * max(1, size)).from_address(address)
        weakref.finalize(memory, last).atexit = False
        flat = torch.frombuffer(memory, dtype=torch.uint8)[:size].view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def on_device(self, like: torch.Tensor) -> torch.Tensor:
        """As the caching allocator gives it, for the current stream."""
        size = like.untyped_storage().nbytes()
        key = (self.current.handle, size)
        for waiting in list(self._waiting):
            if all(event.query() for event in waiting[2]):
                self._waiting.remove(waiting)
                self._free[waiting[0]].append(waiting[1])
        if self._free[key]:
            address = self._free[key].pop()
        else:
            self.machine.library.fake_cuda_malloc.restype = ctypes.c_void_p
            address = self.machine.library.fake_cuda_malloc(0, ctypes.c_size_t(max(1, size)))
            self.allocated += 1
        self._lent[address] = []

        def last() -> None:
            events = [stream.record_event() for stream in self._lent.pop(address)]
            if events:
                self._waiting.append((key, address, events))
            else:
                self._free[key].append(address)

        return fake.claim(self.tensor(address, size, like, last))

    def lend(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._lent[tensor.untyped_storage().data_ptr()].append(stream)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        size = like.untyped_storage().nbytes()
        memory = ctypes.c_void_p()
        self.must("cuMemHostAlloc", ctypes.byref(memory), ctypes.c_size_t(max(1, size)), 0)
        assert memory.value
        handle = ctypes.c_void_p(memory.value)
        return self.tensor(memory.value, size, like, lambda: self.call("cuMemFreeHost", handle))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        asked = (ctypes.c_uint64(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()))
        return bool(self.machine.library.fake_cuda_is_pinned(*asked))

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.stride() == source.stride()
        assert target.dtype == source.dtype
        size = ctypes.c_size_t(target.nbytes)
        to, place = ctypes.c_uint64(target.data_ptr()), ctypes.c_void_p(source.data_ptr())
        handle = ctypes.c_void_p(self.current.handle)
        self.must("cuMemcpyHtoDAsync_v2", to, place, size, handle)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a kernel on the current stream finds in the tensor, once it runs."""
        found = torch.full_like(fake.plain(tensor), -1, device="cpu")
        self._read_into.append(found)
        self.copy_from(tensor, found)
        return found

    def copy_from(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy from the device to the host, or on the device, when the stream comes to it."""
        assert target.stride() == source.stride()
        pointers = (self.current.handle, target.data_ptr(), source.data_ptr())
        size = ctypes.c_size_t(target.nbytes)
        self.machine.library.fake_cuda_read(*map(ctypes.c_void_p, pointers), size)

    def clone(self, tensor: torch.Tensor, memory_format: Any = torch.preserve_format) -> Any:
        """A clone, made when the stream comes to it; at once if its strides are others."""
        form = torch.empty_like(fake.plain(tensor), device="meta", memory_format=memory_format)
        made = self.on_device(form)
        if tensor.numel() and made.stride() == tensor.stride():
            self.copy_from(tensor, made)
        else:
            torch.Tensor.copy_(fake.plain(made), fake.plain(tensor))
        return made

    def living(self) -> fake.Living:
        self.machine.library.fake_cuda_alive.restype = fake.Living
        living: fake.Living = self.machine.library.fake_cuda_alive()
        return living


class Cudart:
    """torch.cuda.cudart(), as far as it page-locks memory."""

    def __init__(self, late: Late) -> None:
        self.late = late

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        call = "cuMemHostRegister_v2"
        return self.late.call(call, ctypes.c_void_p(address), ctypes.c_size_t(size), flags)

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return self.late.call("cuMemHostUnregister", ctypes.c_void_p(address))


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, late: Late) -> None:
        self.late = late
        self.handle = late.machine.stream()
        self.cuda_stream = self.handle
        late.streams += 1

    def record_event(self) -> Event:
        event = Event(self.late)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.late.must("cuStreamWaitEvent", ctypes.c_void_p(self.handle), event.handle, 0)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Runs this stream, and of the others only what it waits for."""
        self.late.machine.library.fake_cuda_run(ctypes.c_void_p(self.handle))


class Event:
    """torch.cuda.Event."""

    def __init__(self, late: Late) -> None:
        self.late = late
        self.handle = ctypes.c_void_p()
        late.must("cuEventCreate", ctypes.byref(self.handle), FOR_ORDER_ONLY)
        weakref.finalize(self, late.call, "cuEventDestroy_v2", self.handle).atexit = False

    @property
    def cuda_event(self) -> int | None:
        return self.handle.value

    def record(self, stream: Stream) -> None:
        self.late.must("cuEventRecord", self.handle, ctypes.c_void_p(stream.handle))

    def query(self) -> bool:
        return self.late.call("cuEventQuery", self.handle) == 0


def start(patch: pytest.MonkeyPatch, machine: fake.Machine) -> Late:
    """Let torch.cuda be a late device for one test."""
    late = Late(machine)
    empty, empty_like, copy = torch.empty, torch.empty_like, torch.Tensor.copy_

    def is_cuda(device: Any) -> bool:
        return device is not None and torch.device(device).type == "cuda"

    def make(like: torch.Tensor, device: Any, pin_memory: bool) -> torch.Tensor:
        """Memory with the form of a tensor that has none, or not this."""
        form = empty_like(like, device="meta")
        return late.pinned(form) if pin_memory else late.on_device(form)

    def new_empty(*size: Any, device: Any = None, pin_memory: bool = False, **rest: Any) -> Any:
        if pin_memory or is_cuda(device):
            return make(empty(*size, device="meta", **rest), device, pin_memory)
        return empty(*size, device=device, **rest)

    def new_like(
        like: torch.Tensor, device: Any = None, pin_memory: bool = False, **rest: Any
    ) -> torch.Tensor:
        if pin_memory or is_cuda(device):
            return make(like, device, pin_memory)
        return empty_like(like, device=device, **rest)

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        if source.is_cuda and not self.is_cuda:
            assert late.is_pinned(self)
            late.copy_from(source, self)
            if not non_blocking:
                late.current.synchronize()
            return self
        if not self.is_cuda:
            return copy(self, source, non_blocking)
        if source.is_cuda and self.stride() != source.stride():
            copy(fake.plain(self), fake.plain(source))  # at once
        elif source.is_cuda:
            late.copy_from(source, self)
        else:
            late.upload(self, source)
        return self

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if self.is_cuda:
            raise RuntimeError("only dense CPU tensors can be pinned")
        return self if late.is_pinned(self) else copy(late.pinned(empty_like(self)), self)

    patch.setattr(torch, "empty", new_empty)
    patch.setattr(torch, "empty_like", new_like)
    patch.setattr(torch.Tensor, "copy_", copy_)
    patch.setattr(torch.Tensor, "is_pinned", lambda self, device=None: late.is_pinned(self))
    patch.setattr(torch.Tensor, "pin_memory", pin_memory)
    patch.setattr(fake.OnCuda, "record_stream", lambda self, stream: late.lend(self, stream))
    patch.setattr(
        fake.OnCuda, "clone", lambda self, **form: late.clone(self, **form), raising=False
    )
    patch.setattr(torch.accelerator, "is_available", lambda: True)
    patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "is_initialized", lambda: True)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "Stream", lambda device=None: Stream(late))
    patch.setattr(torch.cuda, "Event", lambda blocking=False: Event(late))
    patch.setattr(torch.cuda, "cudart", lambda: Cudart(late))
    patch.setattr(torch.cuda, "current_stream", lambda device=None: late.current)
    patch.setattr(torch.cuda, "stream", late.use)
    return late
