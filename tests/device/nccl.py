"""What torch.distributed does with NCCL, on the fake device and over gloo.

A collective gets its input as the current stream has left it, and other ranks' over gloo at once.
Its result arrives late, by a stream of the process group: only a stream that has waited for the
work sees it. So a wait that is missing shows in the values. It is also checked that all ranks call
the same collectives in one order, that nobody writes to what a collective may still read, and that
all work is waited for.

torch's own operators on tensors of the device run at once. Before each that reads or writes
elements, what the current stream holds back is run, and of other streams what it has waited for.
Copies from and to page-locked memory run late. Operators of several tensors want them on one
device.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from faststep import _C, zero
from faststep.offloading import places
from faststep.zero.saved import sliced
from zero.common import _sum

from . import fake
from .late import Cudart, Event, Late, Stream

events = itertools.count()  # of all streams
ASKING = {  # functions that neither read nor write elements
    "__get__", "__set__", "data_ptr", "detach", "dim", "is_floating_point", "is_neg", "numel",
    "size", "stride", "untyped_storage",
}  # fmt: skip
BETWEEN_DEVICES = {"__get__", "__set__", "__setitem__", "copy_", "equal"}


class Work:
    """torch.distributed.Work."""

    def __init__(self, nccl: Nccl, event: Any, read: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._nccl, self._event, self._read = nccl, event, list(read)
        nccl.unfinished.append(self)

    def wait(self) -> None:
        for tensor, before in self._read:
            if not torch.equal(fake.plain(tensor).view(torch.uint8), before.view(torch.uint8)):
                raise AssertionError("what a collective reads was written before it was waited for")
        for tensor, _ in self._read:
            self._nccl.use(tensor)
        self._read = []
        self._nccl.late.current.wait_event(self._event)
        if self in self._nccl.unfinished:
            self._nccl.unfinished.remove(self)

    def is_completed(self) -> bool:
        return bool(self._event.query())


class Nccl:
    """The collectives of torch.distributed for tensors that claim to lie on the device.

    Attributes:
        sent: (name, bytes that this rank sends by a ring), in order.
    """

    def __init__(self, patch: pytest.MonkeyPatch, late: Late) -> None:
        self.late = late
        self.unfinished: list[Work] = []
        self.lent: set[tuple[int, int]] = set()  # memory and streams, by record_stream()
        self.waits: dict[tuple[int, int], int] = {}  # (stream, another): the last event of that one
        self.errors: list[str] = []
        self.sent: list[tuple[str, float]] = []
        self._streams: dict[Any, Stream] = {}
        self._staged: list[int] = []
        self._host = {name: getattr(dist, name) for name in
                      ("all_reduce", "all_gather", "broadcast", "isend", "irecv")}  # fmt: skip
        for name in ("all_reduce", "broadcast", "isend", "irecv"):
            patch.setattr(dist, name, self._either(name))
        patch.setattr(dist, "reduce_scatter_tensor", self.reduce_scatter)
        patch.setattr(dist, "all_gather_into_tensor", self.gather)

    def _either(self, name: str) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(tensor, fake.OnCuda):
                return self._host[name](tensor, *args, **kwargs)
            return getattr(self, name)(tensor, *args, **kwargs)

        return call

    def _begin(self, what: str, group: Any, *tensors: Tensor) -> None:
        """All ranks are here, with the same call; inputs are as the current stream sees them."""
        self.late.current.synchronize()
        said = (what, [(tuple(t.shape), str(t.dtype)) for t in tensors])
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, said, group=group)
        assert found == [said] * len(found), f"ranks call different collectives: {found}"

    def _rows(self, tensor: Tensor, group: Any) -> list[Tensor]:
        mine = fake.plain(tensor).contiguous()
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        self._host["all_gather"](rows, mine, group=group)
        return rows

    def _finish(
        self, group: Any, out: Tensor, values: Tensor, read: Sequence[Tensor], is_async: bool,
        is_counted: bool = False,
    ) -> Any:  # fmt: skip
        """Write the result when the group's stream comes to it.

        Some collectives of torch move the version counter of what they write.
        """
        library = self.late.machine.library
        stream = self._streams.setdefault(group, Stream(self.late))
        stream.wait_stream(self.late.current)
        values = values.contiguous()
        assert out.is_contiguous()
        size = ctypes.c_size_t(values.nbytes)
        if is_counted:
            torch.autograd.graph.increment_version(out)
        staged = library.fake_cuda_malloc(0, ctypes.c_size_t(max(1, values.nbytes)))
        self._staged.append(staged)
        ctypes.memmove(staged, values.data_ptr(), values.nbytes)
        to, source = ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(staged)
        library.fake_cuda_read(ctypes.c_void_p(stream.handle), to, source, size)
        before = [(tensor, fake.plain(tensor).clone()) for tensor in read]
        work = Work(self, stream.record_event(), before)
        self._keep(out)
        if is_async:
            return work
        return work.wait()

    def use(self, tensor: Tensor) -> None:
        """The current stream waits for what reads memory of the stream that has taken it."""
        taker, user = getattr(tensor, "taken_for", None), self.late.current.handle
        if taker in (None, user):
            return
        address, after = tensor.data_ptr(), next(events)

        def freed() -> None:
            waited = self.waits.get((taker, user), -1) > after
            if not waited and (address, user) not in self.lent:
                self.errors.append("memory went back to a stream that had not waited for its use")

        weakref.finalize(tensor, freed).atexit = False

    def _keep(self, out: Tensor) -> None:
        """Memory that is written late must not go back to the CPU's allocator before."""
        self._outs = [*getattr(self, "_outs", [])[-200:], fake.plain(out)]

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        self._begin("all_reduce", group, tensor)
        rows = self._rows(tensor, group)
        share = (len(rows) - 1) / len(rows)
        self.sent.append(("all_reduce", 2 * tensor.nbytes * share))
        largest = op == dist.ReduceOp.MAX
        total = torch.stack(rows).amax(0) if largest else _sum(rows)
        return self._finish(group, tensor, total, [], async_op)

    def reduce_scatter(
        self, out: Tensor, sent: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        self._begin("reduce_scatter", group, out, sent)
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        assert sent.numel() == world * out.numel()
        self.sent.append(("reduce_scatter", sent.nbytes * (world - 1) / world))
        rows = [row.chunk(world)[rank] for row in self._rows(sent, group)]
        work = self._finish(group, out, _sum(rows), [sent], True, True)
        return work if async_op else work.wait()

    def gather(self, out: Tensor, own: Tensor, group: Any = None, async_op: bool = False) -> Any:
        self._begin("all_gather", group, out, own)
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        assert out.numel() == world * own.numel()
        self.sent.append(("all_gather", out.nbytes * (world - 1) / world))
        inside = own.data_ptr() == out.data_ptr() + rank * own.nbytes
        assert inside, "not in place"
        values = torch.cat(self._rows(own, group))
        return self._finish(group, out, values, [own], async_op, True)

    def broadcast(self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        self._begin("broadcast", group, tensor)
        values = fake.plain(tensor).clone()
        self._host["broadcast"](values, src, group=group)
        return self._finish(group, tensor, values, [], async_op)

    def isend(self, tensor: Tensor, dst: int, group: Any = None) -> Any:
        self.late.current.synchronize()
        return self._host["isend"](fake.plain(tensor).contiguous(), dst, group)

    def irecv(self, tensor: Tensor, src: int, group: Any = None) -> Any:
        values = torch.empty_like(fake.plain(tensor))
        self._host["irecv"](values, src, group).wait()
        return self._finish(group, tensor, values, [], True)

    def close(self) -> None:
        assert not self.errors, self.errors[0]
        assert not self.unfinished, "nobody has waited for a collective"
        self.late.machine.lag(0)
        self.late.machine.synchronize()
        while self._staged:
            self.late.machine.library.fake_cuda_free(ctypes.c_void_p(self._staged.pop()))


def _check_devices(func: Any, args: Sequence[Any]) -> None:
    """As torch does: numbers of the host may come to an operator on a device, and no more."""
    if func.__name__ in BETWEEN_DEVICES:
        return
    every = [one for arg in args for one in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    if any(type(one) is Tensor and one.is_cpu and one.dim() for one in every):
        on_device = any(isinstance(one, fake.OnCuda) for one in every)
        assert not on_device, f"{func.__name__} of tensors on two devices"


def _group_even_of_one(process_group: Any, replicate_group: Any, timeout: float) -> Any:
    made = zero.transport.group.group_of(process_group, replicate_group, timeout)
    return zero.transport.group.Group(dist.group.WORLD, timeout) if made is None else made


def start(patch: pytest.MonkeyPatch, machine: fake.Machine) -> Nccl:
    """Let torch.cuda be a late device, and NCCL the backend of its tensors, for one test."""
    late = Late(machine)
    _C.use_streams(machine.lasts)
    inside = fake.OnCuda.__torch_function__.__func__
    busy: list[bool] = []

    def in_order(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _check_devices(func, args)
        if not busy and func.__name__ not in ASKING:
            busy.append(True)
            try:
                late.current.synchronize()
            finally:
                busy.pop()
        return inside(cls, func, types, args, kwargs)

    def synchronize(event: Event) -> None:
        late.must("cuEventSynchronize", event.handle)

    def record(event: Event, stream: Any = None) -> None:
        handle = (late.current if stream is None else stream).handle
        late.must("cuEventRecord", event.handle, ctypes.c_void_p(handle))
        event.source, event.number = handle, next(events)

    plain, copy, zeros = fake.plain, torch.Tensor.copy_, torch.zeros
    empty, empty_like, tensor, wrapper = (
        torch.empty,
        torch.empty_like,
        torch.tensor,
        zero.layout.placeholder.new_wrapper,
    )

    def new_empty(*args: Any, pin_memory: bool = False, device: Any = None, **rest: Any) -> Tensor:
        made = empty(*args, device=device, **rest)
        if isinstance(made, fake.OnCuda):
            made.taken_for = late.current.handle
        return made.fill_(float("nan")) if made.is_floating_point() else made  # as memory of before

    def new_like(like: Tensor, device: Any = None, **rest: Any) -> Tensor:
        on_host = device is not None and torch.device(device).type == "cpu"
        return empty_like(fake.plain(like) if on_host else like, device=device, **rest)

    def new_tensor(*args: Any, device: Any = None, **rest: Any) -> Tensor:
        if device is not None and torch.device(device).type == "cuda":
            fake._note_wait("torch.tensor")
        return tensor(*args, device=device, **rest)

    def new_zeros(*args: Any, **rest: Any) -> Tensor:
        """In memory of the driver, which copies from and to it."""
        made = zeros(*args, **rest)
        if not isinstance(made, fake.OnCuda):
            return made
        lasting = fake.allocated(made.shape, made.dtype)
        plain(lasting).zero_()
        return lasting

    def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking or source.is_cuda is target.is_cuda or not target.numel():
            copy(target, source, non_blocking)  # whose result would be of the class of its source
        elif source.is_cuda and late.is_pinned(target):
            late.copy_from(source, target)
        elif target.is_cuda and late.is_pinned(source):
            late.upload(target, source)
        else:
            copy(target, source, non_blocking)
        return target

    def in_order_plain(tensor: Tensor) -> Tensor:
        if isinstance(tensor, fake.OnCuda):
            late.current.synchronize()
        return plain(tensor)

    note_wait = fake._note_wait

    def wait(name: str) -> None:
        note_wait(name)
        late.current.synchronize()

    patch.setattr(fake, "_note_wait", wait)
    patch.setattr(fake.OnCuda, "__torch_function__", classmethod(in_order))
    patch.setattr(Event, "synchronize", synchronize, raising=False)
    patch.setattr(Event, "record", record)
    patch.setattr(fake, "plain", in_order_plain)
    patch.setattr(torch.Tensor, "copy_", copy_)
    patch.setattr(torch, "zeros", new_zeros)
    patch.setattr(torch, "empty", new_empty)
    patch.setattr(torch, "empty_like", new_like)
    patch.setattr(torch, "tensor", new_tensor)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "Stream", lambda device=None: Stream(late))
    patch.setattr(torch.cuda, "Event", lambda blocking=False: Event(late))
    patch.setattr(torch.cuda, "cudart", lambda: Cudart(late))
    patch.setattr(torch.cuda, "current_stream", lambda device=None: late.current)
    patch.setattr(torch.cuda, "stream", late.use)
    building = importlib.import_module("faststep.zero.build")
    patch.setattr(places, "KINDS", (*places.KINDS, fake.OnCuda))
    patch.setattr(zero.admitted, "_PLAIN", (*zero.admitted._PLAIN, *fake.TYPES))
    # One rank sends to itself, which is what one GPU can test.
    patch.setattr(building, "group_of", _group_even_of_one)
    to_copy = sliced._CHANGES[torch.ops.aten._to_copy.default]
    patch.setattr(  # which goes to no device
        sliced.SlicedState, "to", lambda state, *_, **how: state._changed(to_copy, how)
    )
    patch.setattr(
        zero.transport.group, "backend_for", lambda group, kind: "gloo" if kind == "cpu" else "nccl"
    )
    patch.setattr(
        zero.layout.placeholder, "new_wrapper",
        lambda *args, device, **rest: wrapper(*args, device="cpu", **rest),
    )  # fmt: skip
    unscale = zero.engine.Engine._unscale

    def in_function(*args: Any) -> None:
        with torch._C._EnableTorchFunction():  # a placeholder's dispatch has turned it off
            unscale(*args)

    patch.setattr(zero.engine.Engine, "_unscale", in_function)
    for name, value in (("device", torch.device("cuda", 0)), ("is_cuda", True), ("is_cpu", False)):
        there = property(lambda _, value=value: value)  # type: ignore[misc]
        patch.setattr(zero.layout.placeholder.Placeholder, name, there, raising=False)
    made = Nccl(patch, late)

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        made.lent.add((tensor.data_ptr(), stream.handle))

    wait_event = Stream.wait_event

    def noted_wait(stream: Stream, event: Any) -> None:
        wait_event(stream, event)
        made.waits[stream.handle, event.source] = event.number

    patch.setattr(Stream, "wait_event", noted_wait)
    patch.setattr(fake.OnCuda, "record_stream", record_stream, raising=False)
    return made
