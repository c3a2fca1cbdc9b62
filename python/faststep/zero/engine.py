"""Shards one model over the ranks: its parameters' memory, its gradients, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._torch.optim import increment_version
from ..optim.request import StepAnswer, StepRequest
from .buckets import GradientBucket
from .gradients import Gradients
from .group import Group, Pending
from .in_backward import REFUSED_SCALER, BackwardUpdates
from .layout import Bucket, Flat, make_buckets
from .owned import Kind, Owned
from .pages import Shelf
from .placeholder import Placeholder
from .reducer import Reducer
from .sides import side_of
from .slots import Slot
from .waits import ForwardWaits
from .wrapped import Wrapper

__all__ = ["Engine"]

LAST_BUCKET = 2**20  # bytes


class Engine:
    """The state of a sharded model on one rank.

    Args:
        kind: the class of the fused optimizer.
        groups: the script's parameter groups.
        named: the parameters to shard, in the order in which backward is expected to reach them.
        group: the ranks, two or more.
        stage: 1 keeps the memory of whole gradients between steps, 2 does not.
        bucket_bytes: the size from which a bucket is complete.
        wrapper: the DistributedDataParallel around the model, if there is one.
        updates_in_backward: update each bucket when its gradients are reduced.
        gathers_in_forward: forward waits for parameters one by one.
        keeps_masters: low-precision parameters have fp32 masters.
    """

    def __init__(
        self,
        kind: Kind,
        groups: list[dict[str, Any]],
        named: Sequence[tuple[str, Tensor]],
        group: Group,
        stage: int,
        bucket_bytes: float,
        wrapper: DistributedDataParallel | None = None,
        updates_in_backward: bool = False,
        gathers_in_forward: bool = False,
        keeps_masters: bool = False,
    ) -> None:
        self.group = group
        self._groups = groups
        flats = [
            Flat(param.numel(), param.dtype, param.device, name.rpartition(".")[0] or None)
            for name, param in named
        ]
        side = side_of(flats[0].device if flats else torch.device("cpu"))
        last_bytes = LAST_BUCKET if updates_in_backward or gathers_in_forward else None
        layouts = make_buckets(flats, group.world, bucket_bytes, last_bytes, side.evenly)
        shelf = _shelf_for(layouts, group)
        used = side.uses if updates_in_backward else None
        self.slots: list[Slot] = []
        self.buckets: list[GradientBucket] = []
        self._memory: list[Tensor] = []  # of the parameters, per bucket
        self._views: list[Tensor] = []  # of each slot's parameter in it
        for number, layout in enumerate(layouts):
            members = []
            for place, (param, *_) in enumerate(layout.places):
                name, tensor = named[param]
                slot = Slot(len(self.slots), name, tensor, number, place)
                slot.stand_in = Placeholder(tensor, self, slot.index)
                members.append(slot)
                self.slots.append(slot)
            self.buckets.append(side.bucket(layout, members, group, shelf, stage == 1, used))
            self._move(layout.places, members)
        self._cut()
        by_param = {id(slot.param): slot for slot in self.slots}
        grouped = [[by_param[id(p)] for p in g["params"] if id(p) in by_param] for g in groups]
        in_groups = [slot for members in grouped for slot in members]
        self.owned = Owned(kind, groups, grouped, keeps_masters)
        self.steps = side.steps(in_groups, self.owned, group)
        self._under_way: dict[int, Pending] = {}  # parameters that other ranks have updated
        self.waits: ForwardWaits | None = None  # with gather="forward"
        self.before_exchange: Callable[[str], None] = lambda what: None  # beside backward and step
        reducer = Reducer(self.slots, self.buckets, group, shelf, side.uses)
        self.gradients = Gradients(self.slots, reducer, group)
        self.wrapper = None if wrapper is None else Wrapper.of(wrapper, self.gradients)
        self.updates = BackwardUpdates(self) if updates_in_backward else None
        reducer.updates = self.updates
        self.frozen_states: dict[Tensor, dict[str, Any]] = {}  # of parameters without a slot
        self.names: dict[int, str] = {}  # of all parameters of the model, by their `id`

    def _move(self, places: Sequence[Any], members: list[Slot]) -> None:
        """Move the memory of a bucket's parameters into one flat tensor."""
        layout = self.buckets[-1].layout
        memory = torch.zeros(layout.size, dtype=layout.dtype, device=layout.device)
        self._memory.append(memory)
        for place, slot in zip(places, members, strict=True):
            param = slot.param
            view = memory.as_strided(param.size(), param.stride(), place.begin)
            view.copy_(param.detach())
            param.data = view
            self._views.append(view)

    def _cut(self) -> None:
        """Cut what this rank owns out of parameters and slices."""
        for bucket, memory in zip(self.buckets, self._memory, strict=True):
            start = bucket.layout.slice_of(self.group.rank).start
            by_place = {place.param: slot for place, slot in zip(
                bucket.layout.places, bucket.slots, strict=True)}  # fmt: skip
            for param, begin, count, at in bucket.layout.pieces_of(self.group.rank):
                slot = by_place[param]
                piece = memory[at : at + count].detach()
                slot.pieces.append((piece, bucket.values[at - start : at - start + count]))
                slot.begins.append(begin)

    def share(self, others: Sequence[Tensor]) -> None:
        """Give all ranks the parameters of rank 0, and these tensors; a collective."""
        self.group.broadcast([*self._memory, *others])

    # ---- what a placeholder asks

    def name_of(self, index: int) -> str:
        """The name of a parameter."""
        return self.slots[index].name

    def make_zero(self, index: int) -> None:
        """Set the gradient of a parameter to zero."""
        self.gradients.zero(self.slots[index])

    def scale(self, index: int, factor: float) -> None:
        """Multiply the gradient of a parameter."""
        if self.updates is not None:
            self.updates.refuse_change(self.slots[index].name)
        self.gradients.settle()
        for _, grad in self.slots[index].pieces:
            grad.mul_(factor)

    def unscale(self, dtype: torch.dtype, inv_scale: Tensor, found_inf: Tensor) -> None:
        """Multiply all gradients of a dtype, and look for infinities on all ranks; a collective."""
        if self.updates is not None:
            raise RuntimeError(REFUSED_SCALER)
        self.before_exchange("torch's GradScaler")
        self.gradients.settle()
        self.steps.unscale(dtype, inv_scale, found_inf)

    # ---- steps

    def step(self, request: StepRequest) -> StepAnswer:
        """Update this rank's slices and gather all parameters; a collective."""
        if self.updates is not None:
            return self.updates.end_step(request)
        self.wait(None)
        if self.waits is not None:
            self.waits.learn()
        self.gradients.settle()
        self.follow_moves()
        answer, updated = self.steps.update(request)
        if updated:
            self._gather()
        return answer

    def _gather(self) -> None:
        """Receive what other ranks have updated; the parameters that forward needs first go first.

        With gather="forward" the rest of the program waits for it.
        """
        for number in reversed(range(len(self.buckets))):
            if any(slot.held for slot in self.buckets[number].slots):
                self.start_gather(number)
        if self.waits is None:
            self.wait(None)
        increment_version([slot.param for slot in self.slots if slot.held])

    def start_gather(self, number: int) -> None:
        """Send this rank's slice of a bucket of parameters, and let those of the others come in."""
        self._under_way[number] = self.buckets[number].gather(self._memory[number], number)
        if self.waits is not None:
            self.waits.cover(number)

    def wait(self, buckets: Iterable[int] | None) -> None:
        """Return when these buckets of parameters are there; all of them for None."""
        if not self._under_way:
            return
        for number in list(self._under_way) if buckets is None else buckets:
            if (pending := self._under_way.pop(number, None)) is not None:
                pending.wait()
        if self.waits is not None and not self._under_way:
            self.waits.uncover()

    def wait_in_forward(self, model: nn.Module) -> None:
        """Let modules wait for what they use, in place of the step."""
        bucket_of = {id(slot.param): slot.bucket for slot in self.slots}
        self.waits = ForwardWaits(model, bucket_of, self.wait)

    def follow_moves(self) -> None:
        """Take over parameters whose memory the script has replaced through `.data`."""
        for slot, view in zip(self.slots, self._views, strict=True):
            param = slot.param
            stays = param.data_ptr() == view.data_ptr() or not param.numel()
            if stays and param.size() == view.size() and param.stride() == view.stride():
                continue
            same_form = param.size() == view.size() and param.dtype == view.dtype
            if not same_form or param.device != view.device:
                raise RuntimeError(
                    f"faststep.zero: {slot.name!r} became {param.dtype} of shape "
                    f"{tuple(param.shape)} on {param.device} after shard(), where it was "
                    f"{view.dtype} of shape {tuple(view.shape)} on {view.device}: change the model "
                    "before shard(); nothing was updated"
                )
            view.copy_(param.detach())
            param.data = view

    def clip(self, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        """Scale all gradients so that their common norm is at most `max_norm`; a collective."""
        self.before_exchange("clip_grad_norm_")
        self.gradients.settle()
        return self.steps.clip(max_norm, error_if_nonfinite)

    def refuse_new_parameters(self) -> None:
        """Raise RuntimeError if a parameter of the groups needs a gradient and is not sharded.

        With update="backward" that must be found before the first update.
        """
        known = {id(slot.param) for slot in self.slots}
        for group in self._groups:
            for param in group["params"]:
                if id(param) in known:
                    continue
                if param.grad is not None or (self.updates is not None and param.requires_grad):
                    name = self.names.get(id(param))
                    which = "a new parameter" if name is None else f"parameter {name!r}"
                    raise RuntimeError(
                        f"faststep.zero: {which} of shape {tuple(param.shape)} has a gradient, but "
                        "was frozen or missing when shard() was called: shard the model after it "
                        "was changed; nothing was updated"
                    )


def _shelf_for(layouts: Sequence[Bucket], group: Group) -> Shelf:
    """Memory for what arrives of the slice of any bucket."""
    slices = [(one.slice_of(group.rank), one.dtype.itemsize) for one in layouts]
    own = max(((part.stop - part.start) * size for part, size in slices), default=0)
    return Shelf((group.world - group.leaves_out_own) * own)
