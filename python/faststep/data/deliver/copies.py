"""Copies of batches to a device, on a stream of their own.

Events order the stream of the copies and the consumer's stream. The host never waits.

- Device memory is allocated on the consumer's stream, so torch's allocator treats it as any other
  memory of that stream. Earlier work of that stream may still use the memory. An event, recorded
  after the allocation, marks the end of that work, and the copy waits for it.
- The consumer's stream waits for the copy when a batch is delivered. If the consumer has changed
  the stream since the allocation, `record_stream` tells torch about the new one.
- A copy holds its host memory until it is done, and its device memory until delivery. Batches may
  therefore be dropped at any time.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy as shallow_copy
from dataclasses import dataclass, field
from typing import Any

import torch

from ..._torch.optim import is_capturing
from .batch_buffers import tensor_over

# torch.cuda.Stream and torch.cuda.Event, or what stands for them on the CPU and in tests
Stream = Any
Event = Any


class HostStreams:
    """Streams and events of the CPU, where nothing waits and no tensor is copied."""

    class Passed:
        def query(self) -> bool:
            return True

    device = torch.device("cpu")
    copies: Stream = None  # the stream of the copies

    def current(self) -> Stream:
        """The consumer's stream."""
        return None

    def mark(self, stream: Stream) -> Event:
        """Records an event behind all work that the stream has."""
        return self.Passed()

    def wait(self, stream: Stream, event: Event) -> None:
        """Makes all later work of the stream wait for the event."""

    def copying(self) -> AbstractContextManager[object]:
        """A context in which work goes to the stream of the copies."""
        return nullcontext()

    def allocate(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Device memory, and the page-locked source of the copy; None if `move` has to do it."""
        return None  # on another device: the copy from there has to be waited for

    def move(self, item: Any) -> object:
        """The tensor or object on the device, by its own `to`."""
        return item.to(self.device)


class CudaStreams(HostStreams):
    """A CUDA device, and a stream for copies to it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        if is_capturing():
            raise RuntimeError(
                "a batch cannot be fetched while the current stream is captured into a graph"
            )
        return torch.cuda.current_stream(self.device)

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def copying(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.copies)

    def allocate(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.device.type != "cpu"
            or tensor.layout != torch.strided
            or tensor.is_nested
            or tensor.is_quantized
        ):
            return None
        target = torch.empty_like(tensor, device=self.device)
        source = None  # of one with holes the host would wait for the copy
        if tensor.stride() == target.stride():  # as it would of memory that can be swapped out
            source = tensor if tensor.is_pinned() else page_locked(tensor)
        if source is None:
            source = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return target, source

    def move(self, item: Any) -> object:
        if isinstance(item, torch.Tensor):
            return item.to(self.device, non_blocking=True)
        if not _accepts_non_blocking(item.to):
            return item.to(self.device)
        pinned = item.pin_memory() if hasattr(item, "pin_memory") else item
        return pinned.to(self.device, non_blocking=True)


# of memory with two mappings, one of which is page-locked: their method `locked` has the bytes of
# a storage there, or None
memory_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def page_locked(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same elements where they are page-locked, if an owner of such memory has them.

    Nothing but a copy to the device may see it: its block is used again when it and all tensors of
    the batch are gone, whatever else still reads it.
    """
    if tensor.is_conj() or tensor.is_neg():
        return None  # the block holds other elements
    storage = tensor.untyped_storage()
    for owner in list(memory_owners):
        block = owner.locked(storage)
        if block is not None:
            where = int(tensor.storage_offset()), tensor.shape, tensor.stride()
            return tensor_over(block, tensor.dtype, *where)
    return None


def _accepts_non_blocking(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one that is not written in Python may not say
        return False
    return any(p.name == "non_blocking" or p.kind is p.VAR_KEYWORD for p in parameters)


@dataclass(eq=False)
class Copy:
    """A batch whose copy was started."""

    consumer: Stream  # the stream that the memory is of
    data: object = None  # None after delivery
    later: list[Any] = field(default_factory=list)  # leaves that are copied at delivery
    tensors: list[torch.Tensor] = field(default_factory=list)  # on the device
    sources: list[torch.Tensor] = field(default_factory=list)
    event: Event = None


class Copier:
    """Copies batches to a device. Any thread may use it."""

    def __init__(self, streams: HostStreams) -> None:
        self.streams = streams
        self._pending: deque[Copy] = deque()  # in the order of the stream
        self._forgetting = threading.Lock()

    def start(self, data: object) -> Copy:
        """Start the copy of a batch."""
        streams = self.streams
        copy = Copy(streams.current())
        targets: list[torch.Tensor] = []

        def place(item: object) -> object:
            if not isinstance(item, torch.Tensor):
                copy.later.append(item)
                return item
            if item.device == streams.device:
                copy.tensors.append(item)
                return item
            pair = streams.allocate(item)
            if pair is None:
                copy.later.append(item)
                return item
            targets.append(pair[0])
            copy.tensors.append(pair[0])
            copy.sources.append(pair[1])
            return pair[0]

        copy.data = _convert(data, place)
        streams.wait(streams.copies, streams.mark(copy.consumer))
        try:
            with streams.copying():
                for target, source in zip(targets, copy.sources, strict=True):
                    target.copy_(source, non_blocking=True)
        finally:
            copy.event = streams.mark(streams.copies)
            self._pending.append(copy)
        return copy

    def finish(self, copy: Copy) -> object:
        """Deliver a batch: the current stream waits for its copy."""
        streams = self.streams
        consumer = streams.current()
        streams.wait(consumer, copy.event)
        data = copy.data
        if consumer != copy.consumer:
            for tensor in copy.tensors:
                if tensor.layout == torch.strided:
                    tensor.record_stream(consumer)
        if copy.later:
            data = _convert(data, streams.move)
            moved = Copy(consumer)
            moved.sources, moved.event = copy.later, streams.mark(consumer)
            self._pending.append(moved)
        copy.data, copy.tensors, copy.later = None, [], []
        self.forget_passed()
        return data

    def forget_passed(self) -> None:
        """Release the host memory of copies that are done."""
        if not self._forgetting.acquire(blocking=False):
            return  # another thread is about it
        try:
            while self._pending and self._pending[0].event.query():
                self._pending.popleft().sources.clear()
        finally:
            self._forgetting.release()


def _convert(data: object, change: Callable[[object], object]) -> object:
    """`data` with `change` of each leaf, in containers as torch's pin_memory makes them.

    Leaves are tensors and objects with a method `to`; one that also has `pin_memory` is a leaf even
    if it is a container, as torch lets such an object pin itself. Anything else stays as it is.
    """
    if isinstance(data, torch.Tensor) or (hasattr(data, "pin_memory") and hasattr(data, "to")):
        return change(data)
    if isinstance(data, (str, bytes)):
        return data
    if isinstance(data, Mapping):
        return _mapping(data, {key: _convert(value, change) for key, value in data.items()})
    if isinstance(data, (tuple, Sequence)):
        return _sequence(data, [_convert(item, change) for item in data])
    return change(data) if hasattr(data, "to") else data


def _mapping(data: Any, items: dict[object, object]) -> object:
    """A mapping like `data`: a copy where that can be, as one may have more than its items."""
    try:
        if isinstance(data, MutableMapping):
            clone: Any = shallow_copy(data)
            clone.update(items)
            return clone
        return type(data)(items)
    except TypeError:  # made or filled in another way
        return items


def _sequence(data: Any, items: list[Any]) -> object:
    if isinstance(data, tuple):
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    try:
        if isinstance(data, MutableSequence):
            clone: Any = shallow_copy(data)
            for i, item in enumerate(items):
                clone[i] = item
            return clone
        return type(data)(items)
    except TypeError:  # a range, for one
        return items


_copiers: dict[torch.device, Copier] = {}  # one stream per device, however many loaders there are


def _leave_to_parent() -> None:
    """In a child nothing may free page-locked memory that is in use: CUDA cannot be asked there."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_copiers.copy()))  # also when the child ends
    _copiers.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def copier_of(device: torch.device) -> Copier:
    """The copier to a device, which lives as long as the process.

    Raises:
        RuntimeError: torch finds no such device.
    """
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f"device={str(device)!r}, but torch finds no CUDA device")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    copier = _copiers.get(device)
    if copier is None:
        streams = CudaStreams(device) if device.type == "cuda" else HostStreams()
        copier = _copiers.setdefault(device, Copier(streams))
    return copier
