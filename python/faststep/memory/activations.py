"""What the blocks of a model save for backward, how long they take, and the peak of a step."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .. import _C
from .recompute import Buffers, Drawn

Step = Callable[[], object]
COPIED = 64 << 20  # bytes, to measure the rate of copies


class UndoneStep:
    """A step after which gradients, buffers and random state are what they were before.

    Attributes:
        nbytes: what copies of gradients and buffers take.
        changing: the buffers that the step has changed.
    """

    def __init__(self, step: Step, model: nn.Module, device: torch.device) -> None:
        self._step = step
        self._device = [device] if device.type == "cuda" else []
        self._params = [(one, one._version) for one in model.parameters()]
        self._grads = [(one, one.grad, _copy(one.grad)) for one, _ in self._params]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.layout is torch.strided  # others have no operators in place
        ]
        copies = [copy for *_, copy in self._grads if copy is not None]
        copies += [copy for *_, copy in self._buffers]
        self.nbytes = sum(map(_nbytes, copies))
        self.changing: Buffers = []

    def __call__(self) -> None:
        """Raises ValueError if the step changes parameters."""
        try:
            with Drawn(), torch.random.fork_rng(self._device):
                self._step()
            self.changing = [(module, name) for module, name, *_ in self._changed()]
        finally:
            self._put_back()
        if any(param._version != version for param, version in self._params):
            raise ValueError("step() has changed parameters: leave out optimizer.step()")

    def _changed(self) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
        return [
            (module, name, buffer, copy)
            for module, name, buffer, copy in self._buffers
            if getattr(module, name) is not buffer or not torch.equal(buffer, copy)
        ]

    @torch.no_grad()
    def _put_back(self) -> None:
        for param, grad, copy in self._grads:
            param.grad = grad
            if grad is not None and copy is not None:
                grad.copy_(copy)
        for module, name, buffer, copy in self._changed():
            setattr(module, name, buffer)
            buffer.resize_(copy.shape).copy_(copy)


def _copy(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach().clone()


def _nbytes(tensor: Tensor) -> int:
    """Also of the gradient of a sparse embedding."""
    parts = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
    return sum(part.nbytes for part in parts)


def step_memory(step: Step, device: torch.device) -> tuple[int, int]:
    """Bytes before a step, and at its peak: of tensors on CUDA, else of the resident memory."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return start, torch.cuda.max_memory_allocated(device)
    _C.release_memory()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    start = status("VmRSS")
    step()
    peak = status("VmHWM")
    if not (start and peak):
        raise OSError("/proc/self/status does not tell VmRSS and VmHWM")
    return start, peak


def status(name: str) -> int:
    """A number of bytes that the kernel tells of this process; 0 if it does not."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0


def seconds_per_byte(device: torch.device) -> float | None:
    """The seconds to copy a byte from a device to the host, or back; None for a CPU."""
    if device.type != "cuda":
        return None
    host = torch.empty(COPIED, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)
    host.copy_(there, non_blocking=True)
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    host.copy_(there, non_blocking=True)
    there.copy_(host, non_blocking=True)
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) / (2 * COPIED)


def seconds_of(step: Step, blocks: Sequence[nn.Module], device: torch.device) -> list[float]:
    """The seconds in each block's forward during a step."""
    seconds = [0.0] * len(blocks)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def enter(index: int, *_: object) -> None:
        seconds[index] -= now()

    def leave(index: int, *_: object) -> None:
        seconds[index] += now()

    _hooked(step, blocks, enter, leave)
    return seconds


def saved_by(
    step: Step, model: nn.Module, blocks: Sequence[nn.Module]
) -> tuple[dict[int, int], list[int]]:
    """The bytes that each block saves at the moment of a step when all together save most.

    What blocks get or return is not theirs, as others hold it, too, nor is what checkpoints inside
    of a block compute again. A block that writes to its inputs cannot be computed again: 0 bytes.

    Returns:
        By the index of each block, in the order in which they were called first; and what is saved
        outside of them until the first one is called, until the second one is, and so on.
    """
    fixed = (*model.parameters(), *model.buffers())
    saved = _Saved({_key(one) for one in fixed if one.layout is torch.strided})
    order: dict[int, None] = {}
    entered: list[list[tuple[Tensor, int]]] = []
    written: set[int] = set()

    def enter(index: int, args: object, kwargs: object) -> None:
        order[index] = None
        saved.outside = -1 - len(order)
        inputs = [*_tensors_in((args, kwargs))]
        saved.inside.append((index, set(map(_key, inputs))))
        entered.append([(one, one._version) for one in inputs if not one.is_inference()])

    def leave(index: int, output: object) -> None:
        saved.inside.pop()
        saved.disown(index, map(_key, _tensors_in(output)))
        if any(one._version != version for one, version in entered.pop()):
            written.add(index)

    with saved_tensors_hooks(saved.pack, saved.unpack):
        _hooked(step, blocks, enter, leave)
    saved.note()
    outside = [saved.at_most[-1 - count] for count in range(len(order) + 1)]
    return {one: 0 if one in written else saved.at_most[one] for one in order}, outside


def _hooked(
    step: Step,
    blocks: Sequence[nn.Module],
    enter: Callable[[int, object, object], None],
    leave: Callable[[int, object], None],
) -> None:
    """A step that calls functions around the forward of blocks with their indices."""
    handles = []
    try:
        for index, block in enumerate(blocks):

            def before(_: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
                enter(index, args, kwargs)

            def after(_: nn.Module, __: Any, output: Any, index: int = index) -> None:
                leave(index, output)

            handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(block.register_forward_hook(after))
        step()
    finally:
        for handle in handles:
            handle.remove()


class _Saved:
    """Follows the storages that the graph holds.

    Args:
        fixed: those that a model holds anyway.
    """

    def __init__(self, fixed: set[int]) -> None:
        self.inside: list[tuple[int, set[int]]] = []  # the block that runs, and its inputs
        self.at_most: Counter[int] = Counter()  # bytes by block, and by `outside`
        self.outside = -1  # less the number of blocks that were called
        self._fixed = fixed
        self._live: Counter[int] = Counter()
        self._most = 0
        self._held: dict[int, list[int]] = {}  # block, bytes, and how many tensors

    def pack(self, tensor: Tensor) -> object:
        if tensor.layout is not torch.strided or _key(tensor) in self._fixed:
            return tensor
        key = _key(tensor)
        if key not in self._held:
            index, inputs = self.inside[-1] if self.inside else (self.outside, set())
            owner = self.outside if key in inputs else index
            self._held[key] = [owner, tensor.untyped_storage().nbytes(), 0]
            self._live[owner] += self._held[key][1]
        self._held[key][2] += 1
        return _Pack(self, key, tensor)

    def unpack(self, packed: Any) -> Tensor:
        tensor: Tensor = packed.tensor if isinstance(packed, _Pack) else packed
        return tensor

    def disown(self, index: int, keys: Iterator[int]) -> None:
        for key in keys:
            if key in self._held and self._held[key][0] == index:
                self._live[index] -= self._held[key][1]
                self._live[self.outside] += self._held[key][1]
                self._held[key][0] = self.outside

    def drop(self, key: int) -> None:
        self.note()
        held = self._held[key]
        held[2] -= 1
        if not held[2]:
            self._live[held[0]] -= held[1]
            del self._held[key]

    def note(self) -> None:
        """Keep what is there if it is the most."""
        total = self._live.total()
        if total > self._most:
            self._most, self.at_most = total, self._live.copy()


class _Pack:
    """A tensor that the graph holds; the end of it is told."""

    def __init__(self, saved: _Saved, key: int, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output that keeps its node, and so this, would stay
        self._saved, self._key = saved, key

    def __del__(self) -> None:
        self._saved.drop(self._key)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors_in(value: object) -> Iterator[Tensor]:
    """The strided tensors in tuples, lists and mappings."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(one)
