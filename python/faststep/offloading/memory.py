"""The copies of an optimizer's parameters on the host, the threads, and who waits for them."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from .. import _C
from .._torch.dtensor import is_dtensor
from .._torch.fsdp import is_fsdp_shard
from ..grads.hooks import Hooked
from ..grads.params import params_of
from ..optim.base import FusedOptimizer
from ..optim.request import Rule
from ..zero.step.waits import ForwardWaits
from .places import CHUNK, Place, grad_dtype, held, is_able, like_of, mark, states_like
from .slab import Slab, bytes_of

_TILE = 8 * CHUNK  # elements that a thread copies or updates at a time
_REFUSED, _PARTIAL = 3, 4  # states of a pass: fst_pass_state


class Copies:
    """Of which parameters the host has copies, and which of these are under way.

    Args:
        fraction: the share of elements that it takes, from the first parameter on.
        arrived: the hook of parameters.
        threads: how many update; None: one for each core but the first.
    """

    def __init__(
        self, fraction: float, arrived: Callable[[Tensor], None], threads: int | None
    ) -> None:
        self.places: Hooked[Place] = Hooked()
        self.pipe = _C.Offload(threads or max(1, len(os.sched_getaffinity(0)) - 1), _TILE)
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
        ids = [id(param) for param in params if param.requires_grad]
        if ids == self._ids:
            return
        self.places.keep_only(params)
        self._kept.keep_only(params)
        new: dict[Tensor, tuple[dict[str, Any], Rule]] = {}
        for group, rule in zip(optimizer.param_groups, optimizer._rules(), strict=True):
            for param in group["params"]:
                if param.requires_grad and param not in self.places and param not in self._kept:
                    _refuse(param)
                    new[param] = group, rule
        able = [param for param in new if is_able(param)]
        most = self._fraction * sum(param.numel() for param in able)
        sizes = itertools.accumulate((param.numel() for param in able), initial=0)
        taken = [param for param, before in zip(able, sizes) if before < most]  # noqa: B905
        for param in new.keys() - set(taken):
            self._kept.add(param, None)
        if taken:
            self._take_in(optimizer, {param: new[param] for param in taken})
        self._ids = ids

    def _take_in(
        self, optimizer: FusedOptimizer, taken: dict[Tensor, tuple[dict[str, Any], Rule]]
    ) -> None:
        likes = {param: states_like(optimizer, *which, param) for param, which in taken.items()}
        grads = {param: like_of(param, grad_dtype(param)) for param in taken}
        slab = Slab(sum(bytes_of([p, grads[p], *likes[p].values()]) for p in taken))
        for param in taken:
            rooms = {key: slab.take(like) for key, like in likes[param].items()}
            place = Place(slab.take(param), slab.take(grads[param]), rooms)
            place.values.copy_(param.detach())
            place.written = mark(param)
            if param in optimizer.state:
                place.adopt(optimizer.state[param])
            self.places.add(param, place, self._arrived)
        self.tell_threads()

    def tell_threads(self) -> None:
        """Let the threads know where everything lies; gradients are copied anew."""
        self.wait()
        params = []
        for number, (param, place) in enumerate(self.places):
            place.number, place.seen = number, None
            copies = (place.values, place.grad, place.sums, *place.rooms.values())
            # one without memory gets no gradient, and is not copied back
            there = held(param) if param.data_ptr() else place.values
            params.append((there, *copies))
        self.pipe.set(params)
        model = None if self._model is None else self._model()
        if model is not None:
            self.wait_in_forward(model)

    # ---- waits

    def goes(self, place: Place) -> None:
        """Called when the update of a parameter is allowed."""
        self._under_way.add(place.number)
        if self.waits is not None:
            self.waits.cover(place.number)

    def settle(self) -> None:
        """Return when no gradient is being copied."""
        _check(self.pipe.settle())

    def wait(self, numbers: Iterable[int] | None = None) -> None:
        """Return when these parameters are back on their device; all of them for None."""
        if not self._under_way:
            return
        for number in list(self._under_way) if numbers is None else numbers:
            if number in self._under_way:
                _check(self.pipe.wait(number))
                self._under_way.discard(number)
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


def _refuse(param: Tensor) -> None:
    if param.is_cuda:
        raise NotImplementedError(
            "offload() does not copy from CUDA devices so far: its copies and threads are for "
            "parameters in CPU memory, where they simulate a device"
        )
    if is_dtensor(param) or is_fsdp_shard(param):
        raise NotImplementedError(
            "offload() does not take parameters that are divided over ranks so far (DTensor, "
            "FullyShardedDataParallel)"
        )


def _check(state: int) -> None:
    if state in (_REFUSED, _PARTIAL):
        what = "nothing was updated" if state == _REFUSED else "some parameters were updated"
        raise RuntimeError(f"offload: a copy between host and device has failed; {what}")
