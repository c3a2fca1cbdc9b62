"""The copies of an optimizer's parameters on the host, the threads, and who waits for them."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C
from .._torch.dtensor import is_dtensor, part_of
from .._torch.fsdp import is_fsdp_shard
from ..grads.hooks import Hooked
from ..grads.params import params_of
from ..grads.waits import ForwardWaits
from ..optim.base import FusedOptimizer
from ..optim.param_shards import CHUNK
from ..optim.request import Rule
from .link import Link
from .places import (
    Place,
    grad_dtype,
    held,
    is_able,
    is_alike,
    like_of,
    mark,
    new_sums,
    squares_on_device,
    states_like,
)
from .slab import Slab, bytes_of

MOST_THREADS = 256  # that update
_TILE = 8 * CHUNK  # elements that a thread copies or updates at a time
_REFUSED, _PARTIAL = 3, 4  # states of a pass: fst_pass_state


class Copies:
    """Of which parameters the host has copies, and which of these are under way.

    Args:
        fraction: the share of elements that it takes, from the first parameter on.
        arrived: the hook of parameters; None: they have none, and frozen ones are taken too.
        threads: how many update; None: one for each core but the first.
        cores: those of the threads; none: all of the process.

    Attributes:
        link: to the CUDA device of the parameters; None: they are in host memory.
    """

    def __init__(
        self,
        fraction: float,
        arrived: Callable[[Tensor], None] | None,
        threads: int | None,
        cores: Collection[int],
    ) -> None:
        self.places: Hooked[Place] = Hooked()
        self.pipe = _new_pipe(threads, cores)
        self.link: Link | None = None
        self._fraction = fraction
        self._arrived = arrived
        self._kept: Hooked[None] = Hooked()  # parameters whose states stay on the device
        self._ids: list[int] = []
        self._under_way: set[int] = set()  # parameters that are not known to be back
        self._model: weakref.ref[nn.Module] | None = None
        self.waits: ForwardWaits | None = None

    def attach(self, optimizer: FusedOptimizer) -> None:
        """Take in parameters that are new or were unfrozen, and drop those that left."""
        params = params_of(optimizer)
        ids = [id(param) for param in params if self._takes(param)]
        if ids == self._ids:
            return
        self._find_link(params)
        self.places.keep_only(params)
        self._kept.keep_only(params)
        new: dict[Tensor, tuple[dict[str, Any], Rule]] = {}
        for group, rule in zip(optimizer.param_groups, optimizer._rules(), strict=True):
            for param in group["params"]:
                if self._takes(param) and param not in self.places and param not in self._kept:
                    self._refuse(param)
                    new[param] = group, rule
        able = [param for param in new if self._fits(param)]
        most = self._fraction * sum(param.numel() for param in able)
        sizes = itertools.accumulate((param.numel() for param in able), initial=0)
        taken = [param for param, before in zip(able, sizes) if before < most]  # noqa: B905
        for param in new.keys() - set(taken):
            self._kept.add(param, None)
        if taken:
            self._take_in(optimizer, {param: new[param] for param in taken})
        self._ids = ids

    def stays(self, param: Tensor) -> bool:
        """True for a parameter whose states were left on its CUDA device."""
        return self.link is not None and param in self._kept

    def _takes(self, param: Tensor) -> bool:
        return param.requires_grad or self._arrived is None

    def _fits(self, param: Tensor) -> bool:
        """True for a parameter that the host can have; empty parts of some are such, too."""
        part, is_part = part_of(param), self._arrived is None or is_dtensor(param)
        return is_able(part) or (is_part and self.link is not None and not part.numel())

    def _take_in(
        self, optimizer: FusedOptimizer, taken: dict[Tensor, tuple[dict[str, Any], Rule]]
    ) -> None:
        likes = {param: states_like(optimizer, *which, param) for param, which in taken.items()}
        grads = {param: like_of(param, grad_dtype(param)) for param in taken}
        size = sum(bytes_of([p, grads[p], *likes[p].values()]) for p in taken)
        slab = Slab(size, self.link)
        for param in taken:
            rooms = {key: slab.take(like) for key, like in likes[param].items()}
            place = Place(slab.take(param), slab.take(grads[param]), rooms)
            self.refresh(param, place)
            if param in optimizer.state:
                place.adopt(optimizer.state[param])
            self.places.add(param, place, self._arrived)
        self.tell_threads()

    def tell_threads(self) -> None:
        """Let the threads know where everything lies; gradients are copied anew."""
        self.wait()
        params: list[tuple[Tensor, ...]] = []
        for param, place in self.places:
            part = part_of(param)
            if place.told not in (0, part.data_ptr()):  # memory of before may come again
                place.written = (-1, 0)
            place.seen, place.told = None, part.data_ptr()
            if not part.numel():
                continue
            place.number = len(params)
            copies = (place.values, place.grad, place.sums, *map(part_of, place.rooms.values()))
            if self.link is not None:
                there = part.detach()
                self.link.lend(there)
            else:  # one that was exchanged or has no memory is not updated here
                there = held(part) if is_alike(place, param) else place.values
            params.append((there, *copies))
        if self.link is None:
            self.pipe.set(params)
        else:
            self.pipe.set(params, self.link.device.index, self.link.handle)
        model = None if self._model is None else self._model()
        if model is not None:
            self.wait_in_forward(model)

    def _find_link(self, params: list[Tensor]) -> None:
        """Make the link if there is none yet, and raise for parameters of several devices."""
        devices = {param.device for param in params if self._takes(param)}
        devices |= set() if self.link is None else {self.link.device}
        if not any(device.type == "cuda" for device in devices):
            return
        if len(devices) > 1:
            raise NotImplementedError(
                "offload() takes parameters of one device so far: make an optimizer for each"
            )
        if self.link is None:
            self.link = Link(devices.pop())

    def _refuse(self, param: Tensor) -> None:
        """Raise for a parameter that cannot be taken."""
        if is_fsdp_shard(param):
            raise NotImplementedError(
                "offload() does not take parameters of FullyShardedDataParallel so far: use "
                "fully_shard"
            )
        if is_dtensor(param) and self._model is not None:
            raise NotImplementedError("offload() with model= does not take DTensors so far")
        if self.link is not None and not self._fits(param):
            part = part_of(param)
            raise NotImplementedError(
                f"offload() takes CUDA parameters with elements and without gaps, not one of shape "
                f"{tuple(part.shape)}, strides {part.stride()} and type {part.dtype}"
            )

    def refresh(self, param: Tensor, place: Place) -> None:
        """Copy a parameter that a script has written since `wait` has returned it."""
        if place.written != mark(param):
            place.values.copy_(part_of(param).detach())
            place.written = mark(param)

    def arrive(self, place: Place, grad: Tensor, factor: float) -> bool:
        """Begin to copy a gradient, and to sum its squares; False if the parameter is not back."""
        grad = part_of(grad)
        source = held(grad) if self.link is None else self.link.fetch(grad, place.grad)
        return self.pipe.arrive(place.number, source, factor)

    def begin(self) -> None:
        """Begin another pass."""
        self.wait()
        self.follow()
        self.pipe.begin()

    def follow(self) -> None:
        """Let the threads know of parameters that lie elsewhere now."""
        if any(place.told != part_of(param).data_ptr() for param, place in self.places):
            self.tell_threads()

    def measure(
        self, params: Iterable[Tensor], factor: float, scale: Tensor | None
    ) -> tuple[float, bool]:
        """The norm of the gradients times `factor`, 1 / `scale`, and whether they are finite."""
        pairs = [(param, grad) for param in params if (grad := param.grad) is not None]
        there = [part_of(grad) for param, grad in pairs if self.stays(param)]
        sums_there, is_finite = squares_on_device(there, scale)
        sums, grads = [], []
        self.settle()
        for param, grad in pairs:
            if self.stays(param):
                sums.append(next(sums_there))
                continue
            place = self.places.of(param)
            grads.append(part_of(grad) if place is None else place.grad)
            sums.append(new_sums(grads[-1]) if place is None else place.sums)
            if place is None or place.factor != factor:
                _C.chunk_squares(grads[-1:], factor, sums[-1])
            if place is not None:
                place.factor = factor
        square = _C.fold_squares(torch.cat(sums)) if sums else 0.0
        is_finite = square < math.inf or (is_finite and not _C.measure(grads, factor)[1])
        return math.sqrt(square), is_finite

    # ---- waits

    def goes(self, place: Place) -> None:
        """Called when the update of a parameter is allowed."""
        if place.number >= 0:
            self._under_way.add(place.number)
        if self.waits is not None:
            self.waits.cover(place.number)

    def settle(self) -> None:
        """Return when no gradient is being copied."""
        _check(self.pipe.settle())

    def spare_grads(self) -> None:
        """Return when a script may write gradients, of which copies are under way."""
        if self.link is None:
            self.settle()
        else:
            self.link.join()

    def wait(self, numbers: Iterable[int] | None = None) -> None:
        """Return when these parameters are back on their device; all of them for None.

        On a CUDA device they are about to be, and the current stream waits for that.
        """
        if not self._under_way:
            return
        for number in list(self._under_way) if numbers is None else numbers:
            if number in self._under_way:
                _check(self.pipe.wait(number))
                self._under_way.discard(number)
        if self.link is not None:
            self.link.join()
        if not self._under_way:
            self.settle()
            if self.waits is not None:
                self.waits.uncover()

    def wait_in_forward(self, model: nn.Module) -> None:
        """Let modules wait for their parameters, in place of the step."""
        if self.waits is not None:
            self.waits.remove()
        numbers = {id(param): place.number for param, place in self.places}
        self._model = weakref.ref(model)
        self.waits = ForwardWaits(model, numbers, self.wait)

    def remove(self) -> None:
        """Undo the hooks."""
        self.places.remove()
        if self.waits is not None:
            self.waits.remove()


def _new_pipe(threads: int | None, cores: Collection[int]) -> _C.OffloadPipe:
    every = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)  # of this thread, by which new ones are bound
    try:
        threads = threads or len(cores or every) - 1
        return _C.OffloadPipe(min(max(1, threads), MOST_THREADS), _TILE)
    finally:
        if cores:
            os.sched_setaffinity(0, every)


def _check(state: int) -> None:
    if state in (_REFUSED, _PARTIAL):
        what = "nothing was updated" if state == _REFUSED else "some parameters were updated"
        raise RuntimeError(f"offload: a copy between host and device has failed; {what}")
