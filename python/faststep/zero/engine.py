"""Shards one model over the ranks: its parameters' memory, its gradients, and its steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._torch.optim import increment_version
from ..grads.hooks import weakly
from ..grads.waits import ForwardWaits
from ..optim.masters import StateFormats, has_master
from ..optim.request import StepAnswer, StepRequest
from .admitted import Kept, admit, device_of, line_of, named_in, refuse_taken, taken_of
from .hooks.gradient_buckets import CudaBucket, GradientBucket
from .hooks.gradients import Gradients
from .hooks.reducer import Reducer
from .hooks.values import GradientValues
from .hooks.wrapper import Wrapper
from .layout.cuts import flats_of, make_buckets
from .layout.flat_params import refuse_overlaps
from .layout.pages import BufferPool
from .layout.placeholder import Placeholder
from .layout.slots import Slot
from .saved.sliced import cut_state
from .step.slice_offload import cores_of
from .step.slice_optimizer import Kind, SliceOptimizer
from .transport.group import Group, Pending

LAST_BUCKET = 2**20  # bytes; with gather="forward", which needs it first


class Options(NamedTuple):
    """The arguments of `shard`, the same on all ranks."""

    stage: int
    bucket_bytes: float
    max_grad_norm: float | None
    gather: str
    kept: Kept
    offload: str | None

    def __str__(self) -> str:
        return (
            f"stage {self.stage}, bucket_mb {self.bucket_bytes / 2**20}, max_grad_norm "
            f"{self.max_grad_norm}, gather {self.gather!r}, {self.kept}, offload {self.offload!r}"
        )


class Engine:
    """The state of a sharded model on one rank.

    `kind` makes the fused optimizer. `named` are the parameters to shard, in the order in which
    backward is expected to reach them.
    """

    def __init__(
        self,
        kind: Kind,
        groups: list[dict[str, Any]],
        model: nn.Module,
        named: Sequence[tuple[str, Tensor]],
        group: Group,
        asked: Options,
        wrapper: DistributedDataParallel | None = None,
    ) -> None:
        self.group = group
        self.script_groups: Callable[[], list[dict[str, Any]] | None] = lambda: groups
        self._model = weakref.ref(model)
        self._kind = CudaBucket if group.device.type == "cuda" else GradientBucket
        self._asked = asked
        self._pool = BufferPool(0)
        self.slots: list[Slot] = []
        self.buckets: list[GradientBucket] = []
        self._under_way: dict[int, Pending] = {}  # parameters that other ranks have updated
        self.waits: ForwardWaits | None = None  # with gather="forward"
        self.frozen_states: dict[Tensor, dict[str, Any]] = {}  # of parameters without a slot
        self.slices = SliceOptimizer(kind, group)
        self._reducer = Reducer(self.slots, self.buckets, group, self._pool)
        self.gradients = Gradients(self.slots, self._reducer, group)
        self.values = GradientValues(self.slots, self.gradients, group, weakly(self._unscale))
        self.wrapper = None if wrapper is None else Wrapper.of(wrapper, self.gradients)
        self.gradients.hook(self._add_buckets(named))
        self._regroup(groups, _ids_of(groups))
        self.gradients.on_unowned = weakly(self.follow_groups)

    # ---- buckets

    def _add_buckets(self, named: Sequence[tuple[str, Tensor]]) -> list[Slot]:
        """Move more parameters into buckets of their own."""
        group, asked = self.group, self._asked
        last_bytes = LAST_BUCKET if asked.gather == "forward" else None
        layouts = make_buckets(flats_of(named), group.world, asked.bucket_bytes, last_bytes)
        own = max((one.part * one.dtype.itemsize for one in layouts), default=0)
        self._pool.grow((group.world - group.leaves_out_own) * own)
        first = len(self.slots)
        for layout in layouts:
            members = []
            for place, (param, *_) in enumerate(layout.places):
                name, tensor = named[param]
                slot = Slot(len(self.slots), name, tensor, len(self.buckets), place)
                slot.stand_for(Placeholder(tensor, self.values, slot.index))
                members.append(slot)
                self.slots.append(slot)
            is_wide = asked.kept.masters and has_master(members[0].param)
            sums = torch.float32 if is_wide else layout.dtype
            bucket = self._kind(layout, members, group, self._pool, asked.stage == 1, sums)
            self.buckets.append(bucket)
        return self.slots[first:]

    def follow_groups(self) -> None:
        """Take up what the script has done to its groups, and parameters that are trained by now.

        A collective where parameters have no bucket yet. These get new ones, or raise on all ranks.
        """
        groups = self.script_groups() or []
        ids = _ids_of(groups)
        self.slices.groups = groups
        if ids == self._ids:
            without = [param for param in self._without if param.grad is not None]
            if not without:
                return
        else:
            known = {id(slot.param) for slot in self.slots}
            params = {id(param): param for group in groups for param in group["params"]}
            without = [param for key, param in params.items() if key not in known]
        if without:
            self._take_in(without)
        self._regroup(groups, ids)

    def _take_in(self, params: Sequence[Tensor]) -> None:
        """Move parameters that have no bucket into new ones, but for frozen ones; a collective."""
        model = self._model()
        named, problem, taken = [], None, taken_of(params)
        lines = []
        try:
            named = named_in(nn.Module() if model is None else model, params)
            lines = [line_of(name, param, "new", taken) for name, param in named]
            named = [(n, p) for n, p in named if p.requires_grad or p.grad is not None]
            refuse_taken(named, taken)
            admit(named, [(slot.name, slot.param) for slot in self.slots])
            device_of([*((slot.name, slot.param) for slot in self.slots[:1]), *named])
        except (TypeError, ValueError) as error:
            problem = error
        self.group.check_alike([*lines, str(problem or "")], "faststep.zero: new parameters")
        if problem is not None:
            raise problem
        if not named:
            return
        self.gradients.settle_pass()
        self.wait(None)
        first = len(self.buckets)
        slots = self._add_buckets(named)
        self.group.broadcast([bucket.params.flat for bucket in self.buckets[first:]])
        fused = self.slices.fused
        formats = StateFormats(fused)
        for slot in slots:
            state = self.frozen_states.pop(slot.param, {})
            fused.state.update(cut_state(fused, formats, slot, state))
        self.gradients.take_in(slots)
        if self.waits is not None and model is not None:
            self.waits.remove()
            self.wait_in_forward(model)

    def _regroup(self, groups: list[dict[str, Any]], ids: list[list[int]]) -> None:
        """Step the parameters that these groups have."""
        of = {id(slot.param): slot for slot in self.slots}
        grouped = [[of[id(p)] for p in group["params"] if id(p) in of] for group in groups]
        self._ids = ids
        self._without = [p for group in groups for p in group["params"] if id(p) not in of]
        self.slices.follow(groups, grouped)

    def _unscale(self, dtype: torch.dtype, inv_scale: Tensor, found_inf: Tensor) -> None:
        """Multiply all gradients of a dtype, and look for infinities on all ranks; a collective."""
        self.gradients.before_exchange("torch's GradScaler")
        self._settle()
        self.slices.unscale(dtype, inv_scale, found_inf)

    # ---- steps

    def _settle(self) -> None:
        """Before gradients are used: let the slices have them, of all parameters of the groups."""
        self.gradients.settle()
        self.follow_groups()

    def step(self, request: StepRequest) -> StepAnswer:
        """Update this rank's slices and gather all parameters; a collective."""
        self.wait(None)
        self._settle()
        self.follow_moves()
        answer, updated = self.slices.step(request)
        if updated:
            self._gather()
        return answer

    def _gather(self) -> None:
        """Receive what other ranks have updated; the parameters that forward needs first go first.

        With gather="forward" the rest of the program waits for it.
        """
        for number, bucket in reversed(list(enumerate(self.buckets))):
            if any(slot.held for slot in bucket.slots):
                self.slices.return_all(bucket.slots)
                self._under_way[number] = bucket.gather(number)
                if self.waits is not None:
                    self.waits.cover(number)
        if self.waits is None:
            self.wait(None)
        increment_version([slot.param for slot in self.slices.slots if slot.held])
        self.slices.finish()

    def wait(self, buckets: Iterable[int] | None) -> None:
        """Return when these buckets of parameters are there; all of them for None."""
        if not self._under_way:
            return
        for number in list(self._under_way) if buckets is None else buckets:
            if (pending := self._under_way.pop(number, None)) is not None:
                pending.wait()
                self.buckets[number].params.arrived()
        if self.waits is not None and not self._under_way:
            self.waits.uncover()

    def offload(self) -> None:
        """Keep the states of this rank in host memory; a collective."""
        self.slices.offload(cores_of(self.group))
        self._reducer.on_received = weakly(self.slices.bring)
        self._regroup(self.script_groups() or [], self._ids)

    def wait_in_forward(self, model: nn.Module) -> None:
        """Let modules wait for what they use, in place of the step."""
        bucket_of = {id(slot.param): slot.bucket for slot in self.slots}
        self.waits = ForwardWaits(model, bucket_of, self.wait)

    def follow_moves(self) -> None:
        """Take over parameters whose memory the script has exchanged or shared by `.data`."""
        moved = [(number, bucket.params.away()) for number, bucket in enumerate(self.buckets)]
        if any(away for _, away in moved):
            named = [(slot.name, slot.param) for slot in self.slots]
            refuse_overlaps(named, "faststep.zero", "updated")
        for number, away in moved:
            if away:
                self.wait([number])
                self.buckets[number].params.follow(away)

    def clip(self, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        """Scale all gradients so that their common norm is at most `max_norm`; a collective."""
        self.gradients.before_exchange("clip_grad_norm_")
        self._settle()
        return self.slices.clip(max_norm, error_if_nonfinite)


def _ids_of(groups: Iterable[dict[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]
