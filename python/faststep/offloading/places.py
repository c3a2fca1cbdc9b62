"""What the host has of a parameter, and which tensors can be copied as a whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import _C
from .._torch.dtensor import is_dtensor, like_dtensor, local_of, part_of
from .._torch.held import NotHeld, hold
from ..grads.dtensors import LayoutError, align, is_divided_as, wait_for
from ..optim.base import FusedOptimizer
from ..optim.masters import begin_state, keys_for
from ..optim.param_shards import CHUNK
from ..optim.request import Rule
from .link import Link
from .slab import Slab, bytes_of

KINDS: tuple[type, ...] = (Tensor, Parameter)


class Place:
    """What the host has of one parameter; of a DTensor this rank's part.

    Attributes:
        host: stands for the parameter in steps; a DTensor if that is one.
        host_grad: its gradient.
        values, grad: the same as plain tensors.
        sums: of the gradient's squares, one for each chunk.
        rooms: where its states lie.
        state: the dictionary whose tensors lie there.
        seen: the gradient that was copied, with its version and address; None: none since the step.
        factor: what `sums` are multiplied by; None: they are not those of `seen`.
        written: the parameter's version and address when `values` was the same.
        told: its address, for the threads.
        arrivals, wanted: how often the gradient was accumulated; how often before the last step.
        arrived: its version and address at the last of these.
    """

    def __init__(self, host: Tensor, grad: Tensor, rooms: dict[str, Tensor]) -> None:
        self.host = host
        self.values = part_of(host)
        self._take(grad)
        self.sums = new_sums(self.values)
        self.rooms = rooms
        self.number = -1  # for the threads
        self.state: dict[str, Any] | None = None
        self.seen: tuple[Tensor, int, int] | None = None
        self.factor: float | None = None
        self.written = (-1, 0)
        self.told = 0
        self.arrivals, self.wanted = 0, 1
        self.arrived = (-1, 0)

    def _take(self, grad: Tensor) -> None:
        self.host.grad = None
        self.host.grad_dtype = grad.dtype
        self.host_grad, self.grad = grad, part_of(grad)

    def has(self, grad: Tensor) -> bool:
        """True if this gradient, as it is now, was copied."""
        return self.seen is not None and self.seen[0] is grad and self.seen[1:] == mark(grad)

    def has_states(self, state: dict[str, Any]) -> bool:
        """True if no state lies elsewhere than in its room, because a script has put it there."""
        return all(state.get(key, room) is room for key, room in self.rooms.items())

    def count(self, grad: Tensor) -> bool:
        """Count an accumulation; False if others are expected. A new gradient is the first one."""
        now = mark(grad)
        is_same = now[1] == self.arrived[1] and now[0] > self.arrived[0]
        self.arrivals = self.arrivals + 1 if is_same else 1
        self.arrived = now
        return self.arrivals >= self.wanted

    def make_room(self, dtype: torch.dtype, link: Link | None) -> None:
        """Let gradients be of another type from now on."""
        if dtype != self.grad.dtype:
            like = like_of(self.host, dtype)
            self._take(Slab(bytes_of([like]), link).take(like))

    def adopt(self, state: dict[str, Any]) -> None:
        """Move a parameter's states into their rooms, and counters to the host."""
        if state is self.state:
            return
        for key, value in state.items():
            room = self.rooms.get(key)
            if not isinstance(value, Tensor) or value is room:
                continue
            if room is not None and _is_like(value, room):
                part_of(room).copy_(part_of(value))
                state[key] = room
            elif value.is_cuda:
                state[key] = value.cpu()
        self.state = state


def _is_like(value: Tensor, room: Tensor) -> bool:
    alike = (value.dtype, value.shape) == (room.dtype, room.shape)
    return alike and is_divided_as(value, room)


def held(tensor: Tensor) -> Tensor:
    """A view for the threads, whose memory stays whatever becomes of the tensor and its storage."""
    try:
        return hold(tensor.detach())
    except NotHeld as why:
        raise RuntimeError(f"offload() cannot let threads read this tensor: {why}") from None


def mark(tensor: Tensor) -> tuple[int, int]:
    """What changes when a tensor is written, or the part of a DTensor."""
    part = part_of(tensor)
    return tensor._version + part._version, part.data_ptr()


def new_sums(tensor: Tensor) -> Tensor:
    """Room for the sum of squares of each chunk."""
    return torch.zeros(_chunks(tensor), dtype=torch.float64, device="cpu")


def _chunks(tensor: Tensor) -> int:
    return -(-tensor.numel() // CHUNK)


def squares_on_device(grads: list[Tensor], scale: Tensor | None) -> tuple[Iterator[Tensor], bool]:
    """Sums of squares of each chunk of gradients on a CUDA device, and whether all are finite."""
    if not grads:
        return iter(()), True
    device, counts = grads[0].device, [*map(_chunks, grads)]
    sums = torch.empty(sum(counts), dtype=torch.float64, device=device)
    found = torch.zeros((), dtype=torch.float32, device=device)
    scale = None if scale is None else scale.to(device)
    _C.device_chunk_squares(grads, scale, sums, found)
    parts = sums.cpu().split(counts)  # type: ignore[no-untyped-call]
    return iter(parts), not bool(found)


def grad_dtype(param: Tensor) -> torch.dtype:
    dtype: torch.dtype | None = getattr(param, "grad_dtype", None)
    return dtype or param.dtype


def like_of(param: Tensor, dtype: torch.dtype) -> Tensor:
    if is_dtensor(param):
        return like_dtensor(param, like_of(local_of(param), dtype))
    return torch.empty_strided(param.size(), strides_of(param), dtype=dtype, device="meta")


def inverse_of(scale: Tensor | None) -> float:
    """What gradients are multiplied by, as the step computes it from the scale."""
    if scale is None:
        return 1.0
    inverse = torch.tensor(
        1.0 / scale.item() if scale.item() else float("inf"), dtype=torch.float64, device="cpu"
    )
    return inverse.float().item() if scale.dtype == torch.float32 else inverse.item()


def strides_of(param: Tensor) -> tuple[int, ...]:
    """Those of the parameter without gaps."""
    return torch.empty_like(param, device="meta").stride()


def is_dense(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """True for a plain tensor whose elements lie one after another, in this order."""
    is_plain = _is_plain(tensor) and not tensor.is_neg() and tensor.stride() == strides
    return is_plain and (tensor.data_ptr() != 0 or not tensor.numel())


def _is_plain(tensor: Tensor) -> bool:
    is_strided = type(tensor) in KINDS and tensor.layout == torch.strided
    return is_strided and (tensor.is_cpu or tensor.is_cuda)


def is_able(param: Tensor) -> bool:
    """True for a parameter, or a part of one, that can be copied as a whole."""
    return param.is_floating_point() and param.numel() > 0 and is_dense(param, strides_of(param))


def is_alike(place: Place, param: Tensor) -> bool:
    """True while a parameter has the form that it had when it was taken in."""
    values, param = place.values, part_of(param)
    alike = (param.dtype, param.shape) == (values.dtype, values.shape)
    return alike and is_dense(param, values.stride())


def fits(place: Place, param: Tensor, grad: Tensor) -> bool:
    """True for a gradient that can be copied as a whole; one on a device is brought into order."""
    if not is_divided_as(grad, param):
        return False
    grad = part_of(grad)
    alike = _is_plain(grad) if grad.is_cuda else is_dense(grad, place.values.stride())
    return (
        alike
        and is_alike(place, param)
        and (grad.dtype, grad.shape) == (place.grad.dtype, place.grad.shape)
    )


def is_aligned(param: Tensor) -> bool:
    """Divide the gradient of a DTensor as the parameter is; False if it cannot be."""
    try:
        if align(param) is not None and param.grad is not None:
            wait_for(param.grad)
    except LayoutError:
        return False
    return True


def begins(
    optimizer: FusedOptimizer,
    group: dict[str, Any],
    rule: Rule,
    param: Tensor,
    place: Place | None,
    is_updated: bool,
) -> bool:
    """Make the states of a parameter at its first gradient, and let them lie in their rooms.

    One parameter after another, so that there are never those of two beside the slab. False where
    there are some, or the step makes them, because zeros are not as good as none.
    """
    state = optimizer.state.get(param)
    is_first = is_updated and not state and not optimizer._zeros_differ(group)
    is_first = is_first and bool(keys_for(rule, param))
    if is_first:
        where = param if place is None else place.host
        optimizer.state[param] = state = _new_states(optimizer, group, rule, where, param)
    if state is not None and place is not None:
        place.adopt(state)
    return is_first


def _new_states(
    optimizer: FusedOptimizer, group: dict[str, Any], rule: Rule, where: Tensor, param: Tensor
) -> dict[str, Any]:
    """States of a tensor that stands for a parameter."""
    shard = (rule.shards or {}).get(id(param))
    if shard is not None:
        rule = rule._replace(shards={id(where): shard})
    inner: Any = object.__new__(type(optimizer))
    vars(inner).update(vars(optimizer))
    inner.state = defaultdict(dict)
    begin_state(inner, group, rule, where)
    made: dict[str, Any] = inner.state[where]
    return made


def states_like(
    optimizer: FusedOptimizer, group: dict[str, Any], rule: Rule, param: Tensor
) -> dict[str, Tensor]:
    """States of a parameter without memory, but for its counters."""
    numbers = ("step", *optimizer._numbers)
    made = _new_states(optimizer, group, rule, like_of(param, param.dtype), param)
    states = {key: one for key, one in made.items() if key not in numbers}
    for key, one in optimizer.state.get(param, {}).items():
        if key in states and isinstance(one, Tensor) and one.shape == states[key].shape:
            states[key] = torch.empty_like(states[key], dtype=one.dtype)
    return states


def exchange(optimizer: FusedOptimizer, others: dict[Tensor, Tensor]) -> None:
    """Let parameters with their states be other tensors."""
    for group in optimizer.param_groups if others else ():
        group["params"] = [others.get(param, param) for param in group["params"]]
    if others:
        states = {others.get(param, param): state for param, state in optimizer.state.items()}
        optimizer.state = defaultdict(dict, states)
