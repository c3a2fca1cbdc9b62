"""Tensors that forward saves on a CUDA device wait for backward in host memory.

Two windows of `AHEAD` bytes hide the copies. They run on a stream of their own.

- Forward: what is copied is a clone, made in the order of the script's stream, because the script
  may write to the tensor meanwhile. The clone is let go of when those behind it take more than a
  window. The stream of the script waits for its copy then, not the host. So the memory is used
  again in the order of that stream, however far the host is ahead.
- Backward: the tensors that were saved before the one that it asks for are copied back until they
  take a window. Their memory is taken on the stream that will use it, as in data/deliver/copies.py.

A range of host memory may be used again as soon as its tensors are gone, without an event: all
copies are in the order of the one stream.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.multiprocessing.reductions import StorageWeakRef

from .._torch.optim import is_capturing
from .._torch.saved_tensors import is_wrapped
from .._torch.tensors import storage_record_of
from .slabs import Slabs

AHEAD = 256 << 20  # bytes on their way to the host, or back before they are asked for
SMALL = 256 << 10  # bytes: smaller tensors stay on the device, as a copy takes 10 us anyway
REACH = 64  # tensors that were saved before, among which those to copy back are looked for
KINDS: tuple[type, ...] = (Tensor, nn.Parameter)


class save_on_cpu(graph.save_on_cpu):  # noqa: N801 - torch's name
    """torch.autograd.graph.save_on_cpu, with copies that overlap with the work of the device.

    Tensors that operations in this context save for backward wait for it in host memory.
    Parameters, other leaves that require a gradient, views of these, and tensors of less than
    256 KiB stay on the device. A tensor that is saved several times is copied once. Copies to the
    host lie in page-locked memory that the process keeps for the next step. Up to 256 MiB beyond
    what torch's needs are on the device, on their way to the host or back.

    Tensors that are not plain ones of a CUDA device are saved by torch's own class: on a CPU
    nothing is gained.

    Args:
        pin_memory: the copies are contiguous, as in torch. They are page-locked anyway.
        device_type: of the tensors that torch's own class saves.

    Raises:
        RuntimeError: in backward, if a parameter was changed in place since it was saved, as
            without a context. torch's class goes on with the values that were saved.
    """

    def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
        super().__init__(pin_memory, device_type)
        pack, unpack = self.pack_hook, self.unpack_hook

        def pack_ours(tensor: Tensor) -> Any:
            if not _is_taken(tensor):
                # An output would hold itself, by the graph behind it, until backward has run.
                return pack(tensor if tensor.grad_fn is None else tensor.detach())
            if _is_leaf(tensor) or (tensor._base is not None and _is_leaf(tensor._base)):
                return _Leaf(tensor)
            if tensor.nbytes < SMALL:
                return _Small(_dense(tensor, pin_memory))
            return _copies_of(tensor.device).save(tensor, pin_memory)

        def unpack_ours(packed: Any) -> Any:
            return (
                packed.unpack() if isinstance(packed, (_Leaf, _Small, _Copied)) else unpack(packed)
            )

        self.pack_hook, self.unpack_hook = pack_ours, unpack_ours


def _is_taken(tensor: Tensor) -> bool:
    return (
        type(tensor) in KINDS
        and tensor.is_cuda
        and not is_wrapped(tensor)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not is_capturing()
    )


def _is_leaf(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


def _dense(tensor: Tensor, is_contiguous: bool) -> Tensor:
    """A copy on the device with the strides that torch's copy on the host has."""
    form = torch.contiguous_format if is_contiguous else torch.preserve_format
    return tensor.detach().clone(memory_format=form)


def _is_dense(tensor: Tensor) -> bool:
    """True if the elements lie side by side, in any order of the dimensions."""
    size = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count != 1:
            if stride != size:
                return False
            size *= count
    return True


class _Leaf:
    """A leaf, which the graph holds anyway, or a view of one."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def unpack(self) -> Tensor:
        tensor = self._tensor
        if tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{tensor.type()} {list(tensor.shape)}] is at version "
                f"{tensor._version}; expected version {self._version} instead. "
                "save_on_cpu of faststep keeps parameters where they are"
            )
        return tensor


class _Small:
    """A tensor that stays on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def unpack(self) -> Tensor:
        return self._tensor.clone()


class _Copy:
    """Elements of a storage in host memory.

    Attributes:
        device: they on the device, flat, or None.
        is_leaving: `device` is the clone of forward.
        version: of `device`, as long as backward has not written there.
        event: behind the copy that ran last.
        stream: whose memory `device` is.
        saved: how many tensors of the graph have these elements.
        waiting: those of them that backward asks for before `device` is let go of.
        was_asked: backward has asked for them.
    """

    event: Any
    is_leaving = True
    was_asked = False
    saved = waiting = 0

    def __init__(self, copies: _Copies, tensor: Tensor, clone: Tensor, number: int) -> None:
        self.device: Tensor | None = None
        self.nbytes, self.version = clone.nbytes, clone._version
        # As long as it is known, no other storage has a record with the same address.
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._copies, self.number = copies, number
        self._range = copies.slabs.take(self.nbytes)
        slab, start, _ = self._range
        self.host = slab.memory[start : start + self.nbytes].view(clone.dtype)
        self.stream = torch.cuda.current_stream(tensor.device)
        self.device = clone

    def __del__(self) -> None:  # in any thread, while garbage is collected
        if hasattr(self, "_range"):
            self._copies.slabs.returned.append(self._range)
        if self.device is not None and not self.is_leaving:
            passed = not is_capturing() and self.event.query()
            device = None if passed else self.device
            self._copies.dropped.append((self.nbytes, device, self.stream, self.event))


class _Copied:
    """A tensor of the graph."""

    def __init__(self, copies: _Copies, copy: _Copy, tensor: Tensor, is_contiguous: bool) -> None:
        self._copies, self._copy = copies, copy
        self._shape, self._is_contiguous = tensor.shape, is_contiguous
        self._stride = None if is_contiguous and tensor.is_contiguous() else tensor.stride()
        copy.saved += 1

    def __del__(self) -> None:
        self._copy.saved -= 1

    def unpack(self) -> Tensor:
        tensor = self._copies.load(self._copy)
        # As torch's tensor, it is no view, so that backward may write to it in every mode.
        if self._stride is None:
            tensor.data = tensor.view(self._shape)
            return tensor
        tensor.data = tensor.as_strided(self._shape, self._stride)
        return tensor.contiguous() if self._is_contiguous else tensor


class _Copies:
    """The copies of tensors of one device. Any thread may use them.

    Attributes:
        slabs: the host memory.
        dropped: bytes, memory on the device, its stream and event, of copies that are gone.
    """

    def __init__(self, device: torch.device) -> None:
        self.slabs = Slabs(_page_locked)
        self.dropped: deque[tuple[int, Tensor | None, Any, Any]] = deque()
        self._device = device
        self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._known: weakref.WeakValueDictionary[object, _Copy] = weakref.WeakValueDictionary()
        self._leaving: deque[tuple[weakref.ref[_Copy], int]] = deque()
        self._back: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
        self._bytes_leaving = self._bytes_back = 0
        self._lock = threading.RLock()
        self._order: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
        self._count = 0

    def save(self, tensor: Tensor, is_contiguous: bool) -> _Copied:
        with self._lock:
            self._let_go_of_dropped()
            is_dense = _is_dense(tensor)
            if not is_dense:
                tensor = _dense(tensor, is_contiguous)
            place = storage_record_of(tensor), tensor.data_ptr()
            key = *place, tensor.numel(), tensor.dtype, tensor._version
            copy = self._known.get(key)
            if copy is None:
                flat = tensor.detach().as_strided((tensor.numel(),), (1,))
                copy = self._send(tensor, flat.clone() if is_dense else flat)
                self._known[key] = copy
            return _Copied(self, copy, tensor, is_contiguous)

    def load(self, copy: _Copy) -> Tensor:
        """The elements on the device, flat, for the current stream."""
        with self._lock:
            self._let_go_of_dropped()
            stream, device = torch.cuda.current_stream(self._device), copy.device
            copy.was_asked = True
            if device is not None and copy.is_leaving and copy.stream == stream:
                found = device.clone()
            else:
                if device is None or copy.is_leaving or device._version != copy.version:
                    self._make_room()
                    device = self._fetch(copy, stream)
                stream.wait_event(copy.event)
                if copy.stream != stream:
                    device.record_stream(stream)
                found = device.detach()
                copy.waiting -= 1
                if copy.waiting <= 0:
                    self._let_go(copy)
            self._fetch_earlier(copy, stream)
            return found

    def _send(self, tensor: Tensor, clone: Tensor) -> _Copy:
        copy = self._order[self._count] = _Copy(self, tensor, clone, self._count)
        self._count += 1
        copy.event = self._copied(copy.host, clone, copy.stream)
        self._leaving.append((weakref.ref(copy), copy.nbytes))
        self._bytes_leaving += copy.nbytes
        while self._bytes_leaving > AHEAD and len(self._leaving) > 1:
            reference, nbytes = self._leaving.popleft()
            self._bytes_leaving -= nbytes
            oldest = reference()
            if oldest is not None and oldest.is_leaving:
                self._let_go(oldest)
        return copy

    def _copied(self, target: Tensor, source: Tensor, stream: Any) -> Any:
        """Start a copy behind the work of a stream; returns the event behind the copy."""
        self._copying.wait_event(stream.record_event())
        with torch.cuda.stream(self._copying):
            target.copy_(source, non_blocking=True)
        return self._copying.record_event()

    def _fetch(self, copy: _Copy, stream: Any) -> Tensor:
        """Start the copy to the device."""
        host = copy.host
        device = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self._let_go(copy)
        copy.event, copy.stream = self._copied(device, host, stream), stream
        copy.device, copy.version, copy.waiting = device, device._version, copy.saved
        self._back[id(copy)] = copy
        self._bytes_back += copy.nbytes
        return device

    def _fetch_earlier(self, copy: _Copy, stream: Any) -> None:
        for number in range(copy.number - 1, max(copy.number - 1 - REACH, -1), -1):
            earlier = self._order.get(number)
            if earlier is None or earlier.device is not None or earlier.was_asked:
                continue
            if self._bytes_back and self._bytes_back + earlier.nbytes > AHEAD:
                return
            try:
                self._fetch(earlier, stream)
            except torch.OutOfMemoryError:
                return  # it is copied when backward asks for it

    def _make_room(self) -> None:
        """Let go of what was copied back first, for a tensor that was not: the guess was wrong."""
        while self._bytes_back > AHEAD // 2 and self._back:
            self._let_go(next(iter(self._back.values())))

    def _let_go(self, copy: _Copy) -> None:
        """Let its memory on the device be used again, by its stream once the copy is over."""
        if copy.device is not None:
            copy.stream.wait_event(copy.event)
            if not copy.is_leaving:
                self._bytes_back -= copy.nbytes
                self._back.pop(id(copy), None)
        copy.device, copy.is_leaving = None, False

    def _let_go_of_dropped(self) -> None:
        while self.dropped:
            nbytes, device, stream, event = self.dropped.popleft()
            self._bytes_back -= nbytes
            if device is not None:
                stream.wait_event(event)


def _page_locked(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


_all_copies: dict[torch.device, _Copies] = {}


def _copies_of(device: torch.device) -> _Copies:
    copies = _all_copies.get(device)
    return _all_copies.setdefault(device, _Copies(device)) if copies is None else copies


def _leave_to_parent() -> None:
    """In a child nothing may free page-locked memory, also when it ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_all_copies.copy()))
    _all_copies.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
